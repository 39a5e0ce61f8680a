"""What strategies hold for the runs of Trainers that are done, in a process that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from stratagem.runtime.prepare import release

if TYPE_CHECKING:
    from stratagem.trainer.run import Run

_runs: WeakSet[Run] = WeakSet()
"""Those of this process whose prepared models may still hold something."""


def release_others(run: Run) -> None:
    """Free what strategies hold for Trainers that are done: a process trains model after model."""
    for other in list(_runs):
        if other.trainer is not run.trainer and other.trainer.state.status != "running":
            _runs.discard(other)
            release(other.module)
    _runs.add(run)
