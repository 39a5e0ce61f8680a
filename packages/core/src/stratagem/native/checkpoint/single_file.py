"""SingleFileCheckpointIO: one durable file with a checksum, loaded without executing anything."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from stratagem._plain_data import find_culprit, find_oversized
from stratagem.checkpoint_archive import (
    ArchiveWriter,
    Manifest,
    Sink,
    check_entries,
    not_whole,
    read_archive,
    verify_checksum,
)
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.shards import read_whole
from stratagem.native.checkpoint.durable_directory import remove_any
from stratagem.native.checkpoint.durable_file import DurableFile
from stratagem.native.checkpoint.manifest import manifest_of


class SingleFileCheckpointIO(CheckpointIO):
    """Writes what `torch.save` makes, with a manifest and a checksum, so that it survives.

    A path holds a whole checkpoint or the one before: through a kill at any moment, a full disk, a
    power cut. Tensors are streamed from where they are, so that no second copy is made in memory.
    Every byte is compared with the checksum before anything is loaded. `torch.load` reads the file
    too, and files that plain `torch.save` made are read here, without the check.

    Args:
        verify: compare with the checksum when loading. False saves one reading of the file, where
            it has just been checked (`stratagem checkpoint verify`).

    Example:
        >>> import tempfile, torch
        >>> from stratagem.checkpoint import SingleFileCheckpointIO
        >>> path = f"{tempfile.mkdtemp()}/model.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"weights": torch.ones(2)}, path)
        >>> SingleFileCheckpointIO().load_checkpoint(path)
        {'weights': tensor([1., 1.])}
    """

    def __init__(self, *, verify: bool = True) -> None:
        self.verify = verify

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` to `path`; see `CheckpointIO.save_checkpoint`.

        Raises:
            CheckpointContentError: something in it is not plain data.
            CheckpointSaveError: the file system refused; what was at the path is still there.
        """
        path = Path(path)
        if culprit := find_culprit(checkpoint, "checkpoint"):
            raise CheckpointContentError(
                f"cannot save {path}: {culprit}, which could not be loaded without executing code. "
                "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
            )
        if oversized := find_oversized(checkpoint, "checkpoint"):
            raise CheckpointContentError(
                f"cannot save {path}: {oversized}. Store the tensor before it was expanded"
            )
        if path.is_dir():
            raise CheckpointSaveError(f"cannot save {str(path)!r}: it is a directory, give a file")
        file = None
        try:
            with DurableFile(path) as file:
                write_archive(checkpoint, manifest_of(checkpoint, self), file)
                file.commit()
        except OSError as error:
            if file is not None and file.renamed:
                state = "it is in its place, but may be lost in a power cut"
            elif path.exists():
                state = "what was there before is unchanged"
            else:
                state = "nothing is there"
            raise CheckpointSaveError(
                f"cannot save {str(path)!r}: {type(error).__name__}: {error}; {state}",
                errno=error.errno,
            ) from error

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
            return read_whole(self.open_checkpoint(path))
        # Unbuffered: the checksum reads in large pieces of its own.
        with path.open("rb", buffering=0) as file:
            archive = read_archive(file, str(path))
            if self.verify:
                verify_checksum(file, archive, str(path))
            check_entries(file, archive, str(path))
            # By the descriptor: the file that was checked, though another may have its name by now.
            loaded = _load(f"/proc/self/fd/{file.fileno()}", str(path), archive.size)
        if not isinstance(loaded, dict):
            raise CheckpointCorruptError(
                f"{str(path)!r} holds a {type(loaded).__name__}; expected a dict of state"
            )
        if oversized := find_oversized(loaded, "checkpoint"):
            raise CheckpointCorruptError(f"{str(path)!r} was refused: {oversized}")
        return loaded

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.open_checkpoint`."""
        if not Path(path).is_dir():
            return self.load_checkpoint(path)
        # torch.distributed.checkpoint takes a while to import.
        from stratagem.native.checkpoint.directory_reading import open_directory

        return open_directory(Path(path), verify=self.verify, ranks=self.ranks)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what is at `path`, if there is anything."""
        remove_any(Path(path))


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


def _load(source: str, path: str, size: int) -> Any:
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


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the archive's own checksums: ours finds more, and theirs cost a third of a save."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
