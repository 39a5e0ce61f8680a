"""Which checkpoint "last", "best" or a path means."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.checkpoint.catalog import find_all, first_whole
from stratagem.errors import CheckpointNotFoundError
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.callbacks.checkpoints.model_checkpoint import ModelCheckpoint
    from stratagem.trainer.trainer import Trainer


def find_checkpoint(trainer: Trainer, asked: str | Path) -> paths.Location:
    """Return the path that "best", "last" or a path means; the same on every rank.

    "last" is the newest checkpoint that is whole: one of this Trainer's run if there is any, else
    one of whoever saved in the same folders; one whose weights are not finite only where there is
    no other. Rank 0 looks, and says what it has passed over.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if asked not in ("best", "last"):
        return paths.to_location(asked)
    savers = _savers(trainer)
    if not savers:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(asked)!r} needs a ModelCheckpoint among the callbacks; there is none: "
            "pass a path"
        )
    found, problem = "", ""
    rejected: list[str] = []
    if trainer.is_global_zero:
        try:
            if asked == "best":
                found = next((c.best_model_path for c in savers if c.best_model_path), "")
            else:
                found, rejected = first_whole(
                    _candidates(savers), trainer.strategy.checkpoint_io.verify_checkpoint
                )
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    for text in rejected:
        warnings.warn(f"ckpt_path='last': {text}", stacklevel=2)
    found, problem = trainer.ranks.broadcast([found, problem])
    folders = ", ".join(str(c.dirpath) for c in savers if c.dirpath is not None)
    if problem:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(asked)!r}: {folders} cannot be searched: {problem}"
        )
    if not found:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(asked)!r}: no checkpoint has been saved yet"
            f"{f' in {folders}' if folders else ''}: fit first, or pass a path. A "
            "new run saves in a new folder, unless ModelCheckpoint is given dirpath="
            if not rejected
            else f"ckpt_path='last': none of the {len(rejected)} checkpoint(s) in {folders} is "
            "whole"
        )
    return paths.to_location(found)


def newest_checkpoint(trainer: Trainer) -> str:
    """Return the newest checkpoint that this Trainer's run has saved and kept; "": there is none.

    Looked for on this rank alone.
    """
    kept = {str(paths.absolute(path)) for saver in _savers(trainer) for path in saver.kept_paths}
    found = _candidates(_savers(trainer))
    return next((str(path) for path in found if str(paths.absolute(path)) in kept), "")


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    from stratagem.callbacks.checkpoints.model_checkpoint import ModelCheckpoint

    return [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]


def _candidates(savers: list[ModelCheckpoint]) -> list[paths.Location]:
    """Return what "last" may mean, the most wanted first."""
    # Training cannot go on from weights alone.
    savers = [c for c in savers if not c.save_weights_only] or savers
    found = find_all(c.dirpath for c in savers if c.dirpath is not None)
    own = {str(paths.absolute(path)) for c in savers for path in c.kept_paths}
    return [
        entry.path for entry in sorted(found, key=lambda e: str(paths.absolute(e.path)) not in own)
    ]
