"""SingleFileCheckpointIO: one file, replaced atomically, loaded without executing anything."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from stratagem._plain_data import find_culprit
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
)
from stratagem.interfaces.checkpoint_io import CheckpointIO


class SingleFileCheckpointIO(CheckpointIO):
    """Writes a checkpoint with `torch.save` beside its target, then renames it.

    The order that makes it safe: write a temporary file in the same directory, fsync it, rename it
    over the target, fsync the directory. A kill at any moment leaves the target whole or as it was
    before. Tensors are streamed from where they are: no second copy is made in memory.

    Example:
        >>> import tempfile, torch
        >>> from stratagem.checkpoint import SingleFileCheckpointIO
        >>> path = f"{tempfile.mkdtemp()}/model.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"weights": torch.ones(2)}, path)
        >>> SingleFileCheckpointIO().load_checkpoint(path)
        {'weights': tensor([1., 1.])}
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` to `path`; see `CheckpointIO.save_checkpoint`."""
        path = Path(path)
        if culprit := find_culprit(checkpoint, "checkpoint"):
            raise CheckpointContentError(
                f"cannot save {path}: {culprit}, which could not be loaded without executing code. "
                "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own for each writer: two runs in one directory do not meet.
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _fsync_directory(path.parent)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.load_checkpoint`."""
        path = Path(path)
        if not path.exists():
            there = sorted(p.name for p in path.parent.glob("*.ckpt"))
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {str(path)!r}; in {str(path.parent)!r} there are: "
                f"{', '.join(there) or 'none'}"
            )
        if path.is_dir():
            raise CheckpointCorruptError(
                f"{str(path)!r} is a directory; expected a checkpoint file, such as one of "
                f"{', '.join(sorted(p.name for p in path.glob('*.ckpt'))) or 'none there'}"
            )
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{str(path)!r} holds something that loading would have to execute, so it was "
                f"refused: {str(error).partition('. ')[0]}. Only load checkpoints of plain data"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointCorruptError(
                f"{str(path)!r} is not a whole checkpoint ({path.stat().st_size} bytes): "
                f"{type(error).__name__}: {error}. It may be truncated; use an older one"
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointCorruptError(
                f"{str(path)!r} holds a {type(loaded).__name__}; expected a dict of state"
            )
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file at `path`, if there is one."""
        Path(path).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
