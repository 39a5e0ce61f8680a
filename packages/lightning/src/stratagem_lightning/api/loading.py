"""What much used libraries take from Lightning's private modules: lazy files, meta tensors."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn


class NotYetLoadedTensor:
    """What a tensor is there before it is read. Here a file is mapped, so nothing is one."""


def lazy_load(filename: str | PathLike[str]) -> Any:
    """Return what a file of `torch.save` holds; tensors are read when they are used.

    Nothing in it is executed.

    Args:
        filename: a local file.

    Raises:
        FileNotFoundError: there is none.
    """
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)


def materialize_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, and the first values of its own layers.

    Raises:
        TypeError: a layer has tensors there and no `reset_parameters`; nothing has been changed.
    """
    layers = [layer for layer in module.modules() if _is_meta(layer)]
    without = {type(layer).__name__ for layer in layers if not hasattr(layer, "reset_parameters")}
    if without:
        raise TypeError(
            f"{', '.join(sorted(without))}: expected a method reset_parameters in each layer on "
            "the meta device, which gives it its first values: define one"
        )
    for layer in layers:
        layer.to_empty(device=device, recurse=False)
        reset: Any = layer.reset_parameters
        reset()


def _is_meta(layer: nn.Module) -> bool:
    own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)
