"""Timer: with Lightning's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.launch import rank_zero_info
from stratagem_extras.callbacks import timer
from stratagem_lightning.api.utilities.phrases import in_lightnings_words

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class Timer(timer.Timer):
    """Stratagem's; logs why training ended. Arguments as there."""

    __init__ = in_lightnings_words(timer.Timer.__init__)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """End the time of training; say why training ended where that is the reason."""
        super().on_train_end(trainer, module)
        if self._verbose and self.stopping_reason and trainer.should_stop:
            rank_zero_info(
                f"Time limit reached. Elapsed time is {self.time_elapsed():.1f} s. Signaling "
                "Trainer to stop."
            )
