"""What both front ends stand on: a resolved plan, its strategy, and a model prepared for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.runtime.checkpoint_writer import CheckpointWriter as CheckpointWriter
    from stratagem.runtime.optimizer import LiteOptimizer as LiteOptimizer
    from stratagem.runtime.runtime import as_list as as_list
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "stratagem.runtime.checkpoint_writer": "CheckpointWriter",
            "stratagem.runtime.optimizer": "LiteOptimizer",
            "stratagem.runtime.runtime": "as_list",
        },
    )
