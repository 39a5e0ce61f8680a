"""The archive of `torch.save`, written with a manifest and a checksum, and loaded weights-only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from stratagem import __version__
from stratagem.checkpoint.archive import ArchiveWriter, Manifest, Sink, names_of, not_whole
from stratagem.errors import CheckpointCorruptError
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.state.plain_data import find_oversized
from stratagem.state.reading.archive import load_archive

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


class MappedFile:
    """An open file, mapped into memory: its bytes, and its ranges as storages of tensors.

    The mapping is private: to change a storage changes no file. It outlives the file's descriptor.

    Args:
        file: a local file, opened for reading.
        path: what errors call it.

    Raises:
        CheckpointCorruptError: it is empty.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        descriptor = file.fileno()
        self._size = os.fstat(descriptor).st_size
        if not self._size:
            raise not_whole(path, 0, "it is empty")
        # By the descriptor: the file that was verified, though another may have its name by now.
        self._storage: Any = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{descriptor}", False, self._size
        )

    def load(self, path: str, *, start: int = 0, size: int | None = None, comment: int = 0) -> Any:
        """Return what an archive in the file holds, without executing anything.

        Args:
            path: what errors call it.
            start, size: where the archive lies, in bytes; all of the file by default.
            comment: how many bytes follow the archive's end record.

        Raises:
            CheckpointCorruptError: it is no whole archive of plain data.
        """
        size = self._size if size is None else size
        loaded = load_archive(self._storage, path, start=start, size=size, comment=comment)
        if oversized := find_oversized(loaded, "checkpoint"):
            raise CheckpointCorruptError(f"{path!r} was refused: {oversized}")
        return loaded


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
