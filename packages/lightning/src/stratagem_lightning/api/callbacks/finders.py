"""BatchSizeFinder: Stratagem's, with Lightning's phrases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem_extras.tuner import finders
from stratagem_lightning.api.instance_check import InstanceCheck, of_class
from stratagem_lightning.api.utilities.phrases import in_lightnings_words

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class BatchSizeFinder(finders.BatchSizeFinder, metaclass=InstanceCheck):
    """As `stratagem_extras.tuner.BatchSizeFinder`.

    Example:
        >>> from stratagem_lightning.api.callbacks.finders import BatchSizeFinder
        >>> isinstance(finders.BatchSizeFinder(), BatchSizeFinder)
        True
    """

    is_instance = of_class(finders.BatchSizeFinder)

    @in_lightnings_words
    def setup(self, trainer: Trainer, module: Module, stage: str = "fit") -> None:
        """Find the batch size before data is opened."""
        super().setup(trainer, module, stage)
