"""Start ranks, watch them, and reach them over a network; for authors of launchers.

`stratagem.launch` has the rest of a launcher's parts, and an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem_torch.launch.network import free_port as free_port
    from stratagem_torch.launch.packed import (
        pack as pack,
        rank_failure as rank_failure,
        run_packed as run_packed,
    )
    from stratagem_torch.launch.supervisor import (
        Command as Command,
        Failure as Failure,
        Output as Output,
        RankProcesses as RankProcesses,
        StartRank as StartRank,
    )
    from stratagem_torch.launch.watch import Watch as Watch
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
