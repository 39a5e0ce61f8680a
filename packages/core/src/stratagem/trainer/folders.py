"""The folders that a run writes into, tried before anything else is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError
from stratagem.plan.plan import supports
from stratagem.runtime.runtime import Runtime
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.trainer.trainer import Trainer


def check_before_launch(trainer: Trainer, runtime: Runtime, stage: str) -> None:
    """Try the folders, if this process is going to start the ranks, all of them on its machine.

    Raises:
        ConfigurationError: one cannot be made or written to; nothing has been started.
    """
    plan = trainer.plan
    is_elsewhere = plan.num_nodes > 1 or supports(plan.launcher, "devices_elsewhere")
    if runtime.is_launched or is_elsewhere or not supports(plan.launcher, "starts_ranks"):
        return
    if trainer.is_global_zero:
        _raise(_find_unwritable(trainer, stage))


def check_on_ranks(trainer: Trainer, stage: str) -> None:
    """Try the folders on rank 0, which writes into them; called on every rank.

    Raises:
        ConfigurationError: one cannot be made or written to; the same on every rank.
    """
    found = _find_unwritable(trainer, stage) if trainer.is_global_zero else ""
    _raise(trainer.ranks.broadcast(found))


def _raise(problem: str) -> None:
    if problem:
        raise ConfigurationError(problem)


def _find_unwritable(trainer: Trainer, stage: str) -> str:
    """Return which folder cannot be written to, why, and what to do; "": all can."""
    for folder, argument in _folders(trainer, stage):
        if paths.is_url(folder):
            continue  # its server is asked by the first save
        is_root = paths.to_location(folder) == paths.to_location(trainer.options.default_root_dir)
        what = "default_root_dir" if is_root else argument
        try:
            paths.try_folder(folder)
        except OSError as error:
            return (
                f"{what}={str(folder)!r} is no folder that can be written to "
                f"({type(error).__name__}: {error}): pass one that can, or make room or rights "
                "for it" + ("; None means the current folder" if what == "default_root_dir" else "")
            )
    return ""


def _folders(trainer: Trainer, stage: str) -> Iterator[tuple[paths.Location, str]]:
    """Yield the folders that a run writes into, and which argument each is."""
    if stage == "predict":
        return
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            yield paths.to_location(logger.save_dir), f"{type(logger).__name__}: save_dir"
    for saver in trainer.callbacks if stage == "fit" else ():
        if not isinstance(saver, ModelCheckpoint):
            continue
        if saver.dirpath is not None:
            yield saver.dirpath, f"{type(saver).__name__}: dirpath"
        elif not trainer.loggers:  # otherwise beside the logs
            yield paths.to_location(trainer.options.default_root_dir), "default_root_dir"
