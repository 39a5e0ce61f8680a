"""SingleFileCheckpointIO: one durable file with a checksum, loaded without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.checkpoint import catalog
from stratagem.checkpoint.archive import check_entries, read_archive, verify_checksum
from stratagem.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointSaveError
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.native.checkpoint.archive_io import load_archive, manifest_of, write_archive
from stratagem.state.plain_data import check_contents, find_oversized
from stratagem.state.shards import read_whole
from stratagem.storage import paths
from stratagem.storage.durable_directory import remove_any
from stratagem.storage.durable_file import DurableFile
from stratagem.storage.remote import RemoteFile


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
        path = paths.at(path)
        check_contents(checkpoint, path)
        if isinstance(path, Path) and path.is_dir():
            raise CheckpointSaveError(f"cannot save {str(path)!r}: it is a directory, give a file")
        file = None
        try:
            with _create(path) as file:
                write_archive(checkpoint, manifest_of(checkpoint, self), file)
                file.commit()
        except OSError as error:
            if file is not None and file.renamed:
                state = "it is in its place, but may be lost in a power cut"
            elif _may_exist(path):
                state = "what was there before is unchanged"
            else:
                state = "nothing is there"
            raise CheckpointSaveError(
                f"cannot save {str(path)!r}: {type(error).__name__}: {error}; {state}",
                errno=error.errno,
            ) from error

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.load_checkpoint`."""
        path = paths.at(path)
        if not paths.exists(path):
            folder = paths.parent(path)
            there = sorted(paths.name_of(e.path) for e in catalog.find_all([folder]))
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {str(path)!r}; in {str(folder)!r} there are: "
                f"{', '.join(there) or 'none'}"
            )
        if isinstance(path, Path) and path.is_dir():
            return read_whole(self.open_checkpoint(path))
        with paths.open_local(path) as file:
            archive = read_archive(file, str(path))
            if self.verify:
                verify_checksum(file, archive, str(path))
            check_entries(file, archive, str(path))
            # By the descriptor: the file that was checked, though another may have its name by now.
            loaded = load_archive(f"/proc/self/fd/{file.fileno()}", str(path), archive.size)
        if not isinstance(loaded, dict):
            raise CheckpointCorruptError(
                f"{str(path)!r} holds a {type(loaded).__name__}; expected a dict of state"
            )
        if oversized := find_oversized(loaded, "checkpoint"):
            raise CheckpointCorruptError(f"{str(path)!r} was refused: {oversized}")
        return loaded

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.open_checkpoint`."""
        path = paths.at(path)
        if not isinstance(path, Path) or not path.is_dir():
            return self.load_checkpoint(path)
        # torch.distributed.checkpoint takes a while to import.
        from stratagem.native.checkpoint.directory_reading import open_directory

        return open_directory(path, verify=self.verify, ranks=self.ranks)

    def verify_checkpoint(self, path: str | Path) -> None:
        """Return if the checkpoint at `path` is whole; see `CheckpointIO.verify_checkpoint`."""
        catalog.verify(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what is at `path`, if there is anything."""
        path = paths.at(path)
        if isinstance(path, Path):
            remove_any(path)
        else:
            paths.remove(path)

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        """Make `path` a symbolic link to `target`, or a copy of it on an object store.

        Raises:
            CheckpointSaveError: the file system refused; `path` names what it named before.
        """
        try:
            return paths.link(target, path)
        except OSError as error:
            raise CheckpointSaveError(
                f"cannot let {str(path)!r} name {str(target)!r}: {type(error).__name__}: {error}; "
                "it names what it named before",
                errno=error.errno,
            ) from error


def _create(path: paths.Location) -> DurableFile | RemoteFile:
    return DurableFile(path) if isinstance(path, Path) else RemoteFile(path)


def _may_exist(path: paths.Location) -> bool:
    try:
        return paths.exists(path)
    except OSError:
        return True  # of a file system that cannot be reached: it has changed nothing
