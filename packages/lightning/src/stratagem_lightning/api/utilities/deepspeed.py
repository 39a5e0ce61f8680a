"""The conversion of a checkpoint that ranks wrote in shards, by Lightning's name and arguments."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import MissingPackageError


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None
) -> dict[str, Any]:
    """Make one file with the weights in float32, and return its contents.

    Args:
        checkpoint_dir: a checkpoint that Stratagem saved as a directory.
        output_file: the new file.
        tag: the name of the checkpoint within `checkpoint_dir`. None: it is the checkpoint.

    Raises:
        MissingPackageError: stratagem-backend-deepspeed is not installed.
        CheckpointError: as in `stratagem_deepspeed.convert_zero_checkpoint_to_fp32_state_dict`.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem_lightning.api.utilities.deepspeed import (
        ...     convert_zero_checkpoint_to_fp32_state_dict,
        ... )
        >>> lite, folder = Lite(accelerator="cpu", plugins="directory"), tempfile.mkdtemp()
        >>> lite.launch()
        >>> lite.save(f"{folder}/step=1", {"state_dict": {"weight": torch.ones(2)}})
        >>> convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/step=1", f"{folder}/fp32.ckpt")
        {'state_dict': {'weight': tensor([1., 1.])}}
    """
    try:
        backend = import_module("stratagem_deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "stratagem_deepspeed":
            raise  # of something that it imports
        raise MissingPackageError(
            "convert_zero_checkpoint_to_fp32_state_dict needs stratagem-backend-deepspeed: pip "
            "install stratagem-backend-deepspeed"
        ) from None
    folder = Path(checkpoint_dir) if tag is None else Path(checkpoint_dir) / tag
    backend.convert_zero_checkpoint_to_fp32_state_dict(folder, output_file)
    return SingleFileCheckpointIO().load_checkpoint(output_file)
