"""The archive of `torch.save`, written with a manifest and a checksum, and loaded weights-only."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from stratagem._version import __version__
from stratagem.checkpoint.archive import ArchiveWriter, Manifest, Sink, names_of, not_whole
from stratagem.errors import CheckpointCorruptError
from stratagem.interfaces.checkpoint_io import CheckpointIO

# A manifest has to fit in the archive's comment.
_LONGEST_TEXT = 200


def manifest_of(checkpoint: dict[str, Any], saver: CheckpointIO) -> Manifest:
    """Return the manifest of a checkpoint; epoch, step and run are those of a Trainer's."""

    def number(name: str) -> int | None:
        value = checkpoint.get(name)
        return value if type(value) is int else None

    def text(name: str) -> str | None:
        value = checkpoint.get(name)
        return value[:_LONGEST_TEXT] if isinstance(value, str) else None

    return Manifest(
        stratagem=__version__,
        torch=str(torch.__version__),
        strategy=saver.strategy_name,
        world_size=None if saver.ranks is None else saver.ranks.world_size,
        epoch=number("epoch"),
        global_step=number("global_step"),
        run=text("run"),
        nonfinite=text("nonfinite"),
        contents=names_of(checkpoint),
    )


def write_archive(contents: dict[str, Any], manifest: Manifest, sink: Sink) -> None:
    """Write contents, manifest and checksum to `sink`.

    Raises:
        OSError: what the sink raised.
    """
    writer = ArchiveWriter(sink)
    try:
        with _without_crc32():
            torch.save(contents, cast("IO[bytes]", writer))
    except RuntimeError:
        if writer.error is not None:
            raise writer.error from None
        raise
    writer.finish(manifest)


def load_archive(source: str, path: str, size: int) -> Any:
    """Return what an archive holds, weights-only and mapped into memory.

    Args:
        source: what to open; `path` stands for it in errors.
        path, size: of the checkpoint, size in bytes.

    Raises:
        CheckpointCorruptError: it cannot be loaded without executing code, or is damaged.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointCorruptError(
            f"{path!r} holds something that loading would have to execute, so it was "
            f"refused: {str(error).partition('. ')[0]}. Only load checkpoints of plain data"
        ) from error
    except MemoryError as error:
        raise CheckpointCorruptError(
            f"{path!r} was refused: loading its {size} bytes would take more memory than there is"
        ) from error
    # What torch.load and the unpickler raise for a damaged file is not documented; all of these
    # were seen.
    except (
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:
        raise not_whole(path, size, f"{type(error).__name__}: {error}") from error


_crc32_lock = threading.Lock()


_saving = 0


_crc32_before = True


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the archive's own checksums: ours finds more, and theirs cost a third of a save.

    It is an option of the process, so the last of several threads that save puts it back.
    """
    global _saving, _crc32_before
    with _crc32_lock:
        if _saving == 0:
            _crc32_before = get_crc32_options()
            set_crc32_options(False)
        _saving += 1
    try:
        yield
    finally:
        with _crc32_lock:
            _saving -= 1
            if _saving == 0:
                set_crc32_options(_crc32_before)
