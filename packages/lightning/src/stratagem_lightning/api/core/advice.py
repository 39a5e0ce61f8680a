"""Warnings at the start of a run, of what is valid and often a mistake.

They begin with Lightning's words, because scripts filter warnings by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import RandomSampler

from stratagem.launch import rank_zero_warn
from stratagem.trainer import is_users
from stratagem_lightning.api.utilities.data import has_iterable_dataset, sized_len
from stratagem_lightning.api.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from stratagem.trainer import StepContext


def warn_of_default_epochs(options: Mapping[str, Any]) -> None:
    """Warn if the default number of epochs is the only limit of a fit.

    Args:
        options: the Trainer's arguments.
    """
    limits = ("max_epochs", "max_time", "fast_dev_run")
    if options.get("max_steps", -1) == -1 and not any(options.get(name) for name in limits):
        rank_zero_warn(
            "`max_epochs` was not set. Setting it to 1000 epochs. Pass max_epochs=-1 for a fit "
            "without a limit",
            PossibleUserWarning,
        )


def warn_of_validation(job: Any) -> None:
    """Warn of validation data without a `validation_step`, and of the step without data.

    Args:
        job: the request of a fit.
    """
    has_step = job.model.defines("validation_step")
    has_data = job.val_loaders is not None or any(
        is_users(source, "val_dataloader") for source in (job.datamodule, job.model)
    )
    if has_data and not has_step:
        rank_zero_warn(
            "You passed in a `val_dataloader` but have no `validation_step`: "
            f"{type(job.model).__name__} is trained without validation"
        )
    elif has_step and not has_data:
        rank_zero_warn(
            "You defined a `validation_step` but have no `val_dataloader`: "
            f"{type(job.model).__name__} is trained without validation",
            PossibleUserWarning,
        )


def warn_of_loader(loader: Any, what: str) -> None:
    """Warn of a loader with a length that may be wrong, or that shuffles in an evaluation.

    Args:
        loader: the loader of the user.
        what: "train", "validation", "test" or "predict".
    """
    if has_iterable_dataset(loader) and sized_len(loader) is not None:
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. With several workers, each of them must "
            "yield its own part of the samples, or batches are counted wrongly"
        )
    if what != "train" and isinstance(getattr(loader, "sampler", None), RandomSampler):
        name = what.replace("validation", "val")
        rank_zero_warn(
            f"Your `{name}_dataloader`'s sampler has shuffling enabled: turn shuffling off, so "
            "that each evaluation reads the samples in the same order",
            PossibleUserWarning,
        )


def warn_of_workers_that_start_again(context: StepContext) -> None:
    """Warn of workers that are spawned for each epoch, if ranks are spawned."""
    if context.trainer.plan.launcher.name != "spawn":
        return
    loaders = [("train", context.data.loader.loader)]
    loaders += [("val", one.loader) for one in context.data.validation]
    for name, loader in loaders:
        if getattr(loader, "num_workers", 0) and not getattr(loader, "persistent_workers", True):
            rank_zero_warn(
                f"Consider setting `persistent_workers=True` in `{name}_dataloader` to speed up "
                "the start of its workers, which are spawned for each epoch",
                PossibleUserWarning,
            )


def warn_of_log_interval(context: StepContext) -> None:
    """Warn of an epoch with fewer batches than `log_every_n_steps`."""
    trainer, batches = context.trainer, context.data.loader.batches
    every = trainer.options.log_every_n_steps
    if trainer.loggers and not trainer.options.fast_dev_run and every > batches > 0:
        rank_zero_warn(
            f"The number of training batches ({batches:.0f}) is smaller than the logging interval "
            f"Trainer(log_every_n_steps={every}): pass a smaller number to see values within an "
            "epoch",
            PossibleUserWarning,
        )


def warn_of_unused_schedules(context: StepContext) -> None:
    """Warn of keys of schedulers that manual optimization does not look at."""
    if context.module.automatic_optimization:
        return
    defaults = {"monitor": None, "frequency": 1, "strict": True}
    for config in context.schedulers.configs:
        keys = [name for name, default in defaults.items() if getattr(config, name) != default]
        if keys:
            rank_zero_warn(
                f"The lr scheduler dict contains the key(s) {keys}, but the keys will be ignored. "
                "You need to call `lr_scheduler.step()` manually in manual optimization",
                RuntimeWarning,
            )


def warn_of_eval_mode(context: StepContext) -> None:
    """Warn of modules that are in eval mode when a fit starts, and stay in it."""
    count = sum(not part.training for part in context.module.modules())
    if count and context.module.training:
        rank_zero_warn(
            f"Found {count} module(s) in eval mode at the start of training: the Trainer leaves "
            "them in it. Call module.train() if their dropout and batch norm are to be trained",
            PossibleUserWarning,
        )
