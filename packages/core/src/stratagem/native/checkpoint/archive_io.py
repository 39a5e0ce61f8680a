"""What a checkpoint's manifest says, taken from who saves it and from its contents."""

from __future__ import annotations

from typing import Any

import torch

from stratagem._version import __version__
from stratagem.checkpoint.archive import Manifest, names_of
from stratagem.interfaces.checkpoint_io import CheckpointIO


def manifest_of(checkpoint: dict[str, Any], saver: CheckpointIO) -> Manifest:
    """Return the manifest; a Trainer's checkpoint tells more than one of Lite."""

    def number(name: str) -> int | None:
        value = checkpoint.get(name)
        return value if type(value) is int else None

    return Manifest(
        stratagem=__version__,
        torch=str(torch.__version__),
        strategy=saver.strategy_name,
        world_size=None if saver.ranks is None else saver.ranks.world_size,
        epoch=number("epoch"),
        global_step=number("global_step"),
        run=run if isinstance(run := checkpoint.get("run"), str) else None,
        contents=names_of(checkpoint),
    )
