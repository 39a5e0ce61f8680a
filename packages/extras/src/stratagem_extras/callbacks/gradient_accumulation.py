"""GradientAccumulationScheduler: how many batches a step takes, by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Changes the number of batches in an optimizer step at the start of given epochs.

    The callback is equivalent to `Trainer(accumulate_grad_batches={0: 8, 4: 4})`. A strategy needs
    the schedule before the start, so pass the callback to the Trainer; a Module cannot return it.

    Args:
        scheduling: the number of batches in a step by first epoch, counted from 0.

    Raises:
        ConfigurationError: an epoch is less than 0, a number less than 1; or, when a fit begins,
            the callback was not passed to the constructor of the Trainer.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import GradientAccumulationScheduler
        >>> schedule = GradientAccumulationScheduler(scheduling={0: 8, 4: 4})
        >>> trainer = Trainer(callbacks=schedule, logger=False)
        >>> trainer.options.step_options.accumulation[0], schedule.get_accumulate_grad_batches(5)
        (8, 4)
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigurationError(
                "GradientAccumulationScheduler(scheduling={}): expected at least one epoch, as in "
                "{0: 8, 4: 4}"
            )
        for epoch, count in scheduling.items():
            for what, number, least in (("Epoch", epoch, 0), ("Accumulation factor", count, 1)):
                if isinstance(number, bool) or not isinstance(number, int) or number < least:
                    raise ConfigurationError(
                        f"GradientAccumulationScheduler(scheduling={dict(scheduling)!r}): {what} "
                        f"should be an int of at least {least}, received {number!r}"
                    )
        self.scheduling = {0: 1, **scheduling}
        self.accumulation = self.scheduling
        """What the Trainer takes for `accumulate_grad_batches`."""

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether a step of any epoch takes more than one batch."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return how many batches a step takes in an epoch."""
        return self.scheduling[max(first for first in self.scheduling if first <= epoch)]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Refuse a Trainer that was made without it."""
        accumulation = dict(trainer.options.step_options.accumulation)
        if stage == "fit" and accumulation != self.scheduling:
            raise ConfigurationError(
                "this GradientAccumulationScheduler came after the strategy was set up with "
                f"accumulate_grad_batches={accumulation!r}: pass it to "
                "Trainer(callbacks=...)"
            )
