"""Callbacks that tune at the beginning of a run, as a Tuner does before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks import Callback
from stratagem_extras.tuner.tuner import Tuner, check_has_one_rank

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer
    from stratagem_extras.tuner.lr_finder import LRFinder


class BatchSizeFinder(Callback):
    """Finds the largest batch size that memory has room for when a run begins; see `Tuner`.

    Args:
        mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val: as for
            `Tuner.scale_batch_size`.

    Attributes:
        optimal_batch_size: the result; None before the search.

    Example:
        >>> from stratagem_extras.tuner import BatchSizeFinder
        >>> finder = BatchSizeFinder(mode="binsearch", init_val=16)
        >>> finder.optimal_batch_size is None
        True
    """

    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self.optimal_batch_size: int | None = None
        self._options: dict[str, Any] = {
            "mode": mode,
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "batch_arg_name": batch_arg_name,
            "margin": margin,
            "max_val": max_val,
        }

    def setup(self, trainer: Trainer, module: Module, stage: str = "fit") -> None:
        """Find it before data is opened."""
        check_has_one_rank(trainer)
        # A trial, which is a run as well, has no callbacks but its own.
        job = trainer.run.job
        data = {"datamodule": job.datamodule}
        if job.loaders is not None:
            data["train_dataloaders" if stage == "fit" else "dataloaders"] = job.loaders
        tune: Any = Tuner(trainer).scale_batch_size
        self.optimal_batch_size = tune(module, method=stage, **data, **self._options)


class LearningRateFinder(Callback):
    """Finds a learning rate when a fit begins; see `Tuner`.

    Args:
        min_lr, max_lr, mode, early_stop_threshold, update_attr, attr_name: as for `Tuner.lr_find`.
        num_training_steps: steps in the range.

    Attributes:
        optimal_lr: the finder with the results; None before the search.

    Example:
        >>> from stratagem_extras.tuner import LearningRateFinder
        >>> finder = LearningRateFinder(max_lr=0.1, attr_name="rate")
        >>> finder.optimal_lr is None
        True
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self.optimal_lr: LRFinder | None = None
        self._options: dict[str, Any] = {
            "min_lr": min_lr,
            "max_lr": max_lr,
            "num_training": num_training_steps,
            "mode": mode,
            "early_stop_threshold": early_stop_threshold,
            "update_attr": update_attr,
            "attr_name": attr_name,
        }

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Find it before the optimizer of a fit is made; no other run has a learning rate."""
        if stage == "fit":
            job = trainer.run.job
            self.optimal_lr = Tuner(trainer).lr_find(
                module, job.loaders, datamodule=job.datamodule, **self._options
            )
