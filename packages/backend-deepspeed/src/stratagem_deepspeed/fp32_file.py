"""One file of float32 weights from a checkpoint whose ranks wrote their parts."""

from __future__ import annotations

from pathlib import Path

import torch

from stratagem import storage
from stratagem.checkpoint import DirectoryCheckpointIO, SingleFileCheckpointIO

_TO_RESUME = ("optimizer_states", "lr_schedulers")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path
) -> None:
    """Make one file with the weights in float32; training cannot be resumed from it.

    `stratagem.checkpoint.consolidate_checkpoint` keeps the optimizer's state too.

    Args:
        checkpoint_dir: a checkpoint that was saved as a directory; it must fit into memory.
        output_file: the file, which must not be there yet.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: `checkpoint_dir` is no whole checkpoint.
        CheckpointSaveError: `output_file` is there, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> folder = tempfile.mkdtemp()
        >>> weights = {"weight": torch.ones(2, dtype=torch.bfloat16)}
        >>> lite.save(f"{folder}/step=1", {"state_dict": weights, "optimizer_states": []})
        >>> convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/step=1", f"{folder}/fp32.ckpt")
        >>> torch.load(f"{folder}/fp32.ckpt", weights_only=True)
        {'state_dict': {'weight': tensor([1., 1.])}}
    """
    storage.check_is_new(output_file)
    checkpoint = DirectoryCheckpointIO().load_checkpoint(checkpoint_dir)
    for key in _TO_RESUME:
        checkpoint.pop(key, None)
    checkpoint["state_dict"] = {
        name: value.float()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in checkpoint["state_dict"].items()
    }
    SingleFileCheckpointIO().save_checkpoint(checkpoint, output_file)
