"""FitLoop: a fit's limits and its position, by Lightning's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.trainer import check_whole

if TYPE_CHECKING:
    from stratagem.trainer import Trainer


class _Limit:
    """One of a Trainer's limits as an attribute of its loop; None sets it to "no limit"."""

    def __init__(self, least: int) -> None:
        self._least = least

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: FitLoop, owner: type) -> int:
        limit: int = getattr(loop._trainer, self._name)
        return limit

    def __set__(self, loop: FitLoop, limit: int | None) -> None:
        limit = self._least if limit is None else limit
        check_whole(self._name, limit, self._least)
        setattr(loop._trainer, self._name, limit)


class FitLoop:
    """The limits of a Trainer's fits, which may be set between and within them; and its position.

    Args:
        trainer: whose.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.fit_loop.max_epochs = 3
        >>> trainer.max_epochs
        3
    """

    max_epochs = _Limit(-1)
    max_steps = _Limit(-1)
    min_epochs = _Limit(0)
    min_steps = _Limit(0)

    _trainer: Any

    def __init__(self, trainer: Trainer) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":  # as long as there is none
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.fit_loop has no {name!r}; expected one of {_limits()}, epoch_loop, batch_idx "
            "and total_batch_idx"
        )

    def __setattr__(self, name: str, value: int | None) -> None:
        if not isinstance(vars(FitLoop).get(name), _Limit):
            raise AttributeError(
                f"trainer.fit_loop.{name} cannot be set; expected one of {_limits()}"
            )
        super().__setattr__(name, value)

    @property
    def epoch_loop(self) -> FitLoop:
        """The same: there is one loop."""
        return self

    @property
    def batch_idx(self) -> int:
        """The index of the present batch in its epoch."""
        step = self._trainer.run.step
        return 0 if step is None else step.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the present batch over all epochs."""
        batches: int = self._trainer._progress.batches_before + self.batch_idx
        return batches


def _limits() -> str:
    return ", ".join(name for name, own in vars(FitLoop).items() if isinstance(own, _Limit))
