"""SingleFileCheckpointIO: one durable file with a checksum, loaded without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.errors import CheckpointSaveError
from stratagem.native.checkpoint.archive_io import StoredCheckpointIO, manifest_of, write_archive
from stratagem.state.safe_data import check_contents
from stratagem.storage import paths
from stratagem.storage.local import DurableFile
from stratagem.storage.remote import RemoteFile


class SingleFileCheckpointIO(StoredCheckpointIO):
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

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` to `path`; see `CheckpointIO.save_checkpoint`.

        Raises:
            CheckpointContentError: something in it is not weights-only-safe data.
            CheckpointSaveError: the file system refused; what was at the path is still there.
        """
        path = paths.to_location(path)
        check_contents(checkpoint, path)
        if isinstance(path, Path) and path.is_dir():
            raise CheckpointSaveError(f"cannot save {str(path)!r}: it is a directory, give a file")
        file = None
        try:
            with _create(path) as file:
                write_archive(self.contents(checkpoint), manifest_of(checkpoint, self), file)
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

    def contents(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what the file is to hold of a checkpoint: by default all of it, as it is."""
        return checkpoint


def _create(path: paths.Location) -> DurableFile | RemoteFile:
    return DurableFile(path) if isinstance(path, Path) else RemoteFile(path)


def _may_exist(path: paths.Location) -> bool:
    try:
        return paths.exists(path)
    except OSError:
        return True  # of a file system that cannot be reached: it has changed nothing
