"""SingleFileCheckpointIO: one durable file with a checksum, loaded without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.native.checkpoint.archive_io import StoredCheckpointIO, manifest_of, write_archive
from stratagem.state.safe_data import check_safe_data
from stratagem.storage import paths


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
        check_safe_data(checkpoint, path)
        with paths.durable_file(path) as file:
            write_archive(self.contents(checkpoint), manifest_of(checkpoint, self), file)

    def contents(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what the file is to hold of a checkpoint: by default all of it, as it is."""
        return checkpoint
