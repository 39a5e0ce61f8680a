"""Map a function over the tensors of a batch or a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return `data` with `function` applied to every tensor in it.

    Dicts, lists, tuples, named tuples and dataclasses are traversed and keep their types. Other
    objects are returned unchanged.

    Example:
        >>> import torch
        >>> from stratagem.data import map_tensors
        >>> map_tensors(torch.numel, {"image": torch.zeros(2, 3), "names": ["a", "b"]})
        {'image': 6, 'names': ['a', 'b']}
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in data.items()}
        return mapped if type(data) is dict else type(data)(mapped)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)([map_tensors(function, value) for value in data])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(
            data, **{name: map_tensors(function, value) for name, value in fields.items()}
        )
    return data


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return `data` with tensors, and objects that have a `to(device)` method, moved to `device`.

    Copies from pinned memory are asynchronous. If an object's `to` returns None, the object itself
    is kept, as moved in place.
    """
    if hasattr(data, "to") and not isinstance(data, torch.Tensor):
        moved = data.to(device)
        return data if moved is None else moved
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), data)


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without float64 (Metal, some of Intel's GPUs)."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def convert_floats(data: Any, dtype: torch.dtype) -> Any:
    """Return `data` with its floating-point tensors converted to `dtype`."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data
    )


def convert_module_floats(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating-point parameters and buffers in place, and return it.

    Complex tensors do not change: `module.to(dtype)` would drop their imaginary parts.
    """
    convert = {
        torch.float64: module.double,
        torch.float32: module.float,
        torch.float16: module.half,
        torch.bfloat16: module.bfloat16,
    }
    return convert[dtype]()
