"""One file of float32 weights from a checkpoint whose ranks wrote their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stratagem import storage
from stratagem.checkpoint import DirectoryCheckpointIO, SingleFileCheckpointIO

_TO_RESUME = ("optimizer_states", "lr_schedulers")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None
) -> dict[str, Any]:
    """Make one file with the weights in float32, and return its contents.

    Training cannot be resumed from it.

    `stratagem.checkpoint.consolidate_checkpoint` keeps the optimizer's state too.

    Args:
        checkpoint_dir: a checkpoint that was saved as a directory; it must fit into memory.
        output_file: the file, which must not exist.
        tag: the name of the checkpoint within `checkpoint_dir`. None: `checkpoint_dir` is the
            checkpoint.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: `checkpoint_dir` is not a complete
            checkpoint.
        CheckpointSaveError: `output_file` exists, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import convert_zero_checkpoint_to_fp32_state_dict
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> folder = tempfile.mkdtemp()
        >>> weights = {"weight": torch.ones(2, dtype=torch.bfloat16)}
        >>> lite.save(f"{folder}/step=1", {"state_dict": weights, "optimizer_states": []})
        >>> convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/fp32.ckpt", "step=1")
        {'state_dict': {'weight': tensor([1., 1.])}}
    """
    storage.check_is_new(output_file)
    source = checkpoint_dir if tag is None else f"{checkpoint_dir}/{tag}"
    checkpoint = DirectoryCheckpointIO().load_checkpoint(source)
    for key in _TO_RESUME:
        checkpoint.pop(key, None)
    checkpoint["state_dict"] = {
        name: value.float()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in checkpoint["state_dict"].items()
    }
    SingleFileCheckpointIO().save_checkpoint(checkpoint, output_file)
    return checkpoint
