"""FitLoop: where users of the 2.x line find a fit's limits and its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.trainer.options import check_whole

if TYPE_CHECKING:
    from stratagem.trainer.attributes import TrainerAttributes

_LIMITS = {"max_epochs": -1, "max_steps": -1, "min_epochs": 0, "min_steps": 0}


class FitLoop:
    """The limits of a Trainer's fits, which may be set between and within them; and its position.

    Args:
        trainer: whose.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.fit_loop.max_epochs = 3
        >>> trainer.max_epochs
        3
    """

    max_epochs: int
    max_steps: int
    min_epochs: int
    min_steps: int

    def __init__(self, trainer: TrainerAttributes) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> int:
        if name not in _LIMITS:
            raise AttributeError(
                f"trainer.fit_loop has no {name!r}; expected one of {', '.join(_LIMITS)}, "
                "epoch_loop, batch_idx and total_batch_idx"
            )
        value: int = getattr(vars(self)["_trainer"], name)
        return value

    def __setattr__(self, name: str, value: int | None) -> None:
        if name not in _LIMITS:
            raise AttributeError(
                f"trainer.fit_loop.{name} cannot be set; expected one of {', '.join(_LIMITS)}"
            )
        least = _LIMITS[name]
        value = least if value is None else value
        check_whole(name, value, least)
        setattr(vars(self)["_trainer"], name, value)

    @property
    def epoch_loop(self) -> FitLoop:
        """The same: there is one loop."""
        return self

    @property
    def batch_idx(self) -> int:
        """The index of the present batch in its epoch."""
        trainer: TrainerAttributes = vars(self)["_trainer"]
        return trainer.run.step.batch_idx if trainer.run.step is not None else 0

    @property
    def total_batch_idx(self) -> int:
        """The index of the present batch over all epochs."""
        trainer: TrainerAttributes = vars(self)["_trainer"]
        return trainer._progress.batches_before + self.batch_idx
