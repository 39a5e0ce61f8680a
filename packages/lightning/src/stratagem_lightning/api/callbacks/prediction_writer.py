"""BasePredictionWriter: with the interval as Lightning's enumeration."""

from __future__ import annotations

from typing import Any, Literal

from stratagem_extras.callbacks import prediction_writer
from stratagem_lightning.api.core.states import WriteInterval


class BasePredictionWriter(prediction_writer.BasePredictionWriter):
    """Writes predictions; `interval.on_batch` and `interval.on_epoch` define when.

    Args:
        write_interval: "batch", "epoch" or "batch_and_epoch".

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import BasePredictionWriter
        >>> BasePredictionWriter("epoch").interval.on_epoch
        True
    """

    def __init__(
        self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"
    ) -> None:
        super().__init__(write_interval)
        self.interval: Any = WriteInterval(write_interval)
