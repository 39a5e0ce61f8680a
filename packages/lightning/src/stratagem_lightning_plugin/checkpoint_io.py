"""LightningCheckpointIO: a Trainer's checkpoints in the form that Lightning loads."""

from __future__ import annotations

from typing import Any

from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem_lightning_plugin.checkpoint_format import to_lightning


class LightningCheckpointIO(SingleFileCheckpointIO):
    """Writes single files as Lightning 2.x does: its Trainer resumes from them.

    A Stratagem Trainer resumes from them as from any checkpoint of Lightning: they lack RNG states
    and the position in the data. Other checkpoints, such as a checkpoint of Lite, are written
    unchanged.

    Args:
        verify: as in `SingleFileCheckpointIO`.

    Example:
        >>> import tempfile, torch
        >>> from stratagem.checkpoint import LightningCheckpointIO
        >>> path = f"{tempfile.mkdtemp()}/model.ckpt"
        >>> saved = {"format_version": 2, "epoch": 0, "global_step": 4, "state_dict": {}}
        >>> LightningCheckpointIO().save_checkpoint(saved, path)
        >>> torch.load(path)["pytorch-lightning_version"]
        '2.6.6'
    """

    def contents(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint in Lightning's form."""
        return to_lightning(checkpoint) if "format_version" in checkpoint else checkpoint
