"""Other checkpoints from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.storage import paths


def consolidate_checkpoint(source: str | Path, target: str | Path) -> None:
    """Make one file of a checkpoint that is a directory; nothing is lost.

    Args:
        source: the directory; checked before anything is loaded. All of it must fit into memory.
        target: the file, which must not be there yet.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: `source` is no whole checkpoint.
        CheckpointSaveError: `target` is there, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import consolidate_checkpoint
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> folder = tempfile.mkdtemp()
        >>> lite.save(f"{folder}/step=1", {"weights": torch.ones(2)})
        >>> consolidate_checkpoint(f"{folder}/step=1", f"{folder}/step=1.ckpt")
        >>> torch.load(f"{folder}/step=1.ckpt", weights_only=True)
        {'weights': tensor([1., 1.])}
    """
    paths.check_is_new(target)
    io = SingleFileCheckpointIO()
    io.save_checkpoint(io.load_checkpoint(source), target)
