"""StochasticWeightAveraging: with what subclasses read of Lightning's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem_extras.callbacks.stochastic_weight_averaging import (
    StochasticWeightAveraging as NativeAveraging,
)
from stratagem_lightning.api.instance_check import Shown

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class StochasticWeightAveraging(NativeAveraging):
    """Stratagem's, with the epochs of the average. Arguments as there.

    Example:
        >>> from stratagem_lightning.api.callbacks.stochastic_weight_averaging import (
        ...     StochasticWeightAveraging,
        ... )
        >>> StochasticWeightAveraging(swa_lrs=1e-2)._initialized
        False
    """

    _max_epochs = -1

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Note the last epoch."""
        self._max_epochs = trainer.options.max_epochs
        super().on_fit_start(trainer, module)

    @Shown
    def swa_end(self) -> float:
        """The last epoch, counted from 0; infinity if there is none."""
        return float("inf") if self._max_epochs == -1 else self._max_epochs - 1

    @property
    def _initialized(self) -> bool:
        """Whether the average has begun."""
        return self._schedule is not None

    @property
    def _swa_epoch_start(self) -> float:
        return self._start

    @property
    def _swa_lrs(self) -> list[float]:
        return self._rates

    @property
    def _latest_update_epoch(self) -> int:
        return self._last_epoch
