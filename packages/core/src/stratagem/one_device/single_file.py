"""SingleFileCheckpointIO: one durable file with a checksum, loaded without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.one_device.archive_io import StoredCheckpointIO, manifest_of, write_archive
from stratagem.state.safe_data import check_safe_data
from stratagem.storage import paths


class SingleFileCheckpointIO(StoredCheckpointIO):
    """Writes checkpoints with `torch.save`, a manifest and a checksum, in one durable file.

    A path always holds a complete checkpoint, the new or the previous one, even after a kill, a
    full disk or a power cut. Tensors are streamed to the file without a second copy in memory. The
    checksum of the whole file is verified before loading. `torch.load` can read these files. This
    class can read files of `torch.save`, without a verification.

    Args:
        verify: if True, verify the checksum when loading. False saves one pass over a file that was
            just verified (`stratagem checkpoint verify`).

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
            CheckpointContentError: the checkpoint contains an object that is not weights-only-safe
                data.
            CheckpointSaveError: the file system rejected the file; an existing file stays at the
                path.
        """
        path = paths.to_location(path)
        check_safe_data(checkpoint, path)
        with paths.durable_file(path) as file:
            write_archive(self.contents(checkpoint), manifest_of(checkpoint, self), file)

    def contents(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the file for a checkpoint; by default the whole checkpoint."""
        return checkpoint
