"""Callbacks of core and of installed distributions; each is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.callbacks.callback import Callback as Callback
from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.callbacks.checkpoints.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from stratagem.callbacks.checkpoints.names import filled as filled
    from stratagem.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from stratagem.callbacks.progress.bar import (
        ProgressBar as ProgressBar,
        batches_to_evaluate as batches_to_evaluate,
        batches_to_train as batches_to_train,
    )
    from stratagem.callbacks.progress.display import Display as Display, Row as Row
    from stratagem.callbacks.progress.report import (
        full_numel as full_numel,
        short_count as short_count,
    )

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(__name__, "callback")
