"""Checkpoints of both formats, opened after verification; and archives of `torch.save`, written."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from stratagem import __version__
from stratagem.checkpoint import catalog
from stratagem.checkpoint.archive import (
    ArchiveWriter,
    Manifest,
    Sink,
    names_of,
    not_whole,
    read_archive,
    verify_checksum,
)
from stratagem.discovery.registry import get_registry
from stratagem.errors import CheckpointCorruptError, CheckpointSaveError, UnknownNameError
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.ranks import Ranks
from stratagem.state.safe_data import find_oversized
from stratagem.state.shards import read_whole
from stratagem.storage import paths
from stratagem.system import descriptor_path

# A manifest has to fit in the archive's comment.
_LONGEST_TEXT = 200


def manifest_of(checkpoint: dict[str, Any], saver: CheckpointIO) -> Manifest:
    """Return the manifest of a checkpoint, with a Trainer's epoch, step and run ID, if any.

    Example:
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, manifest_of
        >>> manifest_of({"epoch": 2, "step": 1}, SingleFileCheckpointIO()).epoch
        2
    """

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
        OSError: the error of the sink.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import Manifest, open_archive, write_archive
        >>> manifest = Manifest(stratagem="0.1.0", torch="2.13.0")
        >>> with tempfile.TemporaryFile() as file:
        ...     write_archive({"step": 1}, manifest, file)
        ...     open_archive(file, "a file", verify=True)
        {'step': 1}
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

    The mapping is private: a change of a storage does not change the file. It outlives the file
    descriptor.

    Args:
        file: a local file, opened for reading.
        path: the name of the file in errors.

    Raises:
        CheckpointCorruptError: the file is empty.

    Example:
        >>> import tempfile, torch
        >>> from stratagem.checkpoint import MappedFile
        >>> with tempfile.TemporaryFile() as file:
        ...     torch.save({"step": 1}, file)
        ...     file.flush()
        ...     MappedFile(file, "a file").load("a file")
        {'step': 1}
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        descriptor = file.fileno()
        self._size = os.fstat(descriptor).st_size
        if not self._size:
            raise not_whole(path, 0, "it is empty")
        # Open by the descriptor of the verified file: another file may have its name now.
        place = descriptor_path(descriptor)
        if place is not None:
            self._storage: Any = torch.UntypedStorage.from_file(place, False, self._size)
        else:
            mapped = mmap.mmap(descriptor, self._size, access=mmap.ACCESS_COPY)
            self._storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()

    def load(self, path: str, *, start: int = 0, size: int | None = None, comment: int = 0) -> Any:
        """Return the contents of an archive in the file, without executing anything.

        Args:
            path: the name of the file in errors.
            start, size: the position of the archive, in bytes; the complete file by default.
            comment: the number of bytes after the end record of the archive.

        Raises:
            CheckpointCorruptError: the data are not a complete archive of weights-only-safe data.
        """
        from stratagem.state.reading.archive import load_archive

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


class CheckpointReader:
    """Opens checkpoints, and remembers the last verified file.

    If `open` follows `verify`, the file is read once, and `open` returns the verified contents even
    if another file has taken its name.

    Args:
        verify: verify checksums before loading.
    """

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify
        self._verified: dict[str, Any] | None = None
        self._identity: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # To another process goes nothing that was read.
        return partial(CheckpointReader, verify=self._verify), ()

    def verify(self, path: str | os.PathLike[str]) -> None:
        """Raise if the checkpoint is damaged, so that `open` would fail.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: the path has no complete checkpoint.
            OSError: the checkpoint cannot be read.
        """
        self.forget()
        path = paths.to_location(path)
        if isinstance(path, Path) and path.is_dir():
            _open_directory(path, verify=True, ranks=None, check_parts=True)
            return
        catalog.check_exists(path)
        with paths.open_local(path) as file:
            identity = _identity(os.fstat(file.fileno()))
            contents = open_archive(file, str(path), verify=True)
        if isinstance(path, Path):
            self._verified, self._identity = contents, identity

    def open(self, path: str | os.PathLike[str], *, ranks: Ranks | None = None) -> dict[str, Any]:
        """Return a checkpoint of either format, without executing anything.

        The tensors of a file are mapped into memory. Each sharded tensor of a directory is a
        `LazyTensor`, and the ranks share the verification; every rank must make the call.

        Args:
            path: a file, a directory, or the URL of a file.
            ranks: the ranks that make the call; None for this process alone.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: the path has no complete checkpoint.
        """
        path = paths.to_location(path)
        if isinstance(path, Path) and path.is_dir():
            self.forget()
            return _open_directory(path, verify=self._verify, ranks=ranks)
        catalog.check_exists(path)
        verified = self._take_verified(path)
        if verified is not None:
            return verified
        with paths.open_local(path) as file:
            return open_archive(file, str(path), verify=self._verify)

    def forget(self) -> None:
        """Let go of the file that was verified last."""
        self._verified, self._identity = None, ()

    def _take_verified(self, path: paths.Location) -> dict[str, Any] | None:
        """Return what was verified last, if it is at `path` and has not changed since."""
        verified, identity = self._verified, self._identity
        self.forget()
        try:
            at_path = Path(path).stat()
        except (OSError, ValueError):
            return None  # a URL
        return verified if _identity(at_path) == identity else None


def _identity(state: os.stat_result) -> tuple[int, ...]:
    """Return what changes where a file is replaced or written to."""
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


# -- one file


def open_archive(file: BinaryIO, path: str, *, verify: bool) -> dict[str, Any]:
    """Return the contents of an archive, without executing anything.

    Args:
        file: a local file, opened for reading.
        path: the name of the file in errors.
        verify: whether to compare the file with its checksum first.

    Raises:
        CheckpointCorruptError: the file is not a complete archive of weights-only-safe data.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import Manifest, open_archive, write_archive
        >>> manifest = Manifest(stratagem="0.1.0", torch="2.13.0")
        >>> with tempfile.TemporaryFile() as file:
        ...     write_archive({"step": 1}, manifest, file)
        ...     open_archive(file, "a file", verify=True)
        {'step': 1}
    """
    archive = read_archive(file, path)
    if verify:
        verify_checksum(file, archive, path)
    loaded = MappedFile(file, path).load(path, comment=archive.comment)
    if not isinstance(loaded, dict):
        raise CheckpointCorruptError(
            f"{path!r} holds a {type(loaded).__name__}; expected a dict of state"
        )
    return loaded


# -- a directory


def _open_directory(
    path: Path, *, verify: bool, ranks: Ranks | None, check_parts: bool = False
) -> dict[str, Any]:
    """Open a directory by the format of another distribution, which is imported here."""
    catalog.check_directory(path)
    try:
        directory_format = get_registry().find("checkpoint_io", "directory").spec.load()
    except UnknownNameError as error:
        raise UnknownNameError(f"{str(path)!r} is a directory: {error}") from None
    opened: dict[str, Any] = directory_format.open_directory(
        path, verify=verify, ranks=ranks, check_parts=check_parts
    )
    return opened


class StoredCheckpointIO(CheckpointIO):
    """The base of core's formats: it reads, verifies, links and removes checkpoints of each.

    Args:
        verify: compare with the checksums when loading.

    Example:
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, StoredCheckpointIO
        >>> issubclass(SingleFileCheckpointIO, StoredCheckpointIO)
        True
    """

    def __init__(self, *, verify: bool = True) -> None:
        self.verify = verify
        self._reader = CheckpointReader(verify=verify)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.load_checkpoint`."""
        return read_whole(self.open_checkpoint(path))

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.open_checkpoint`."""
        return self._reader.open(path, ranks=self.ranks)

    def verify_checkpoint(self, path: str | Path) -> None:
        """Return if the checkpoint at `path` is whole; see `CheckpointIO.verify_checkpoint`."""
        self._reader.verify(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at `path`, if any."""
        paths.remove(path)

    def teardown(self) -> None:
        """Close the file that was verified last."""
        self._reader.forget()

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        """Make `path` a symbolic link to `target`, or a copy of the target on an object store.

        Raises:
            CheckpointSaveError: the file system rejected the link; `path` is unchanged.
        """
        try:
            return paths.link(target, path)
        except OSError as error:
            raise CheckpointSaveError(
                f"cannot let {str(path)!r} name {str(target)!r}: {type(error).__name__}: {error}; "
                "it names what it named before",
                errno=error.errno,
            ) from error
