"""Map a function over the containers and tensors of a batch, or over a model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from array import array
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES

from stratagem.errors import UserCodeError

_ATOMS = frozenset(
    {str, int, float, bool, complex, bytes, bytearray, array, type(None), torch.Size}
)
"""Common classes without tensors."""


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return `data` with `function` applied to every tensor in it.

    `map_items` says which containers are traversed. Other objects are returned unchanged.

    Example:
        >>> import torch
        >>> from stratagem.data import map_tensors
        >>> map_tensors(torch.numel, {"image": torch.zeros(2, 3), "names": ["a", "b"]})
        {'image': 6, 'names': ['a', 'b']}
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    return map_items(lambda item: map_tensors(function, item), data)


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return `data` with tensors, and objects that have a `to(device)` method, moved to `device`.

    Such objects may be nested in containers. Copies from pinned memory are asynchronous. If an
    object's `to` returns None, the object itself is kept, as moved in place.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=data.is_pinned())
    if _has_to(data):
        moved = data.to(device)
        return data if moved is None else moved
    return map_items(lambda item: move_to_device(item, device), data)


def map_items(function: Callable[[Any], Any], container: Any) -> Any:
    """Return a container of the same class with `function` applied to each of its items.

    Containers are mappings, lists, tuples, dataclasses, attrs classes, classes that are registered
    with torch's pytree (tensordict's, transformers' outputs), and objects with the methods `to`,
    `apply` and `__copy__` (PyTorch Geometric's data). Any other object is returned unchanged.

    A class of the user's is copied with `copy.copy`, and the copy is filled. Its constructor is not
    called, and its other attributes are kept. A container of such a class is returned itself if
    `function` returns each item unchanged.

    Args:
        function: called once for each item, in order.
        container: the container.

    Raises:
        UserCodeError: an instance of the class cannot be copied and filled.

    Example:
        >>> from collections import defaultdict
        >>> from stratagem.data import map_items
        >>> map_items(abs, defaultdict(list, {"x": -1}))
        defaultdict(<class 'list'>, {'x': 1})
    """
    kind = type(container)
    if kind is dict:
        return {key: function(value) for key, value in container.items()}
    if kind is list:
        return [function(value) for value in container]
    if kind is tuple:
        return tuple([function(value) for value in container])
    if kind in _ATOMS:
        return container
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        items, context = node.flatten_fn(container)
        return node.unflatten_fn([function(item) for item in items], context)
    if isinstance(container, Mapping):
        return _map_mapping(function, container)
    if isinstance(container, (tuple, MutableSequence)):
        return _map_sequence(function, container)
    if isinstance(container, (type, nn.Module)):
        return container
    if dataclasses.is_dataclass(container) or hasattr(kind, "__attrs_attrs__"):
        return _map_attributes(function, container)
    if all(hasattr(kind, method) for method in ("to", "apply", "__copy__")):
        return _copy(container).apply(function)
    return container


def _map_mapping(function: Callable[[Any], Any], mapping: Mapping[Any, Any]) -> Any:
    before = dict(mapping.items())
    mapped = {key: function(value) for key, value in before.items()}
    changed = {key: value for key, value in mapped.items() if value is not before[key]}
    if not changed:
        return mapping
    if not isinstance(mapping, MutableMapping):
        return _rebuild(mapping, mapped)
    filled = _copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # attributes are items
        filled.__dict__ = filled
    for key, value in changed.items():
        filled[key] = value
    if any(mapping[key] is value for key, value in changed.items()):
        for key in changed:
            mapping[key] = before[key]
        raise UserCodeError(
            f"copy.copy() of a {type(mapping).__name__} shares its items with the original, so a "
            "changed copy would change the original too: give the class a method __copy__"
        )
    return filled


def _map_sequence(function: Callable[[Any], Any], sequence: Any) -> Any:
    mapped = [function(value) for value in sequence]
    if all(new is old for new, old in zip(mapped, sequence, strict=True)):
        return sequence
    if isinstance(sequence, tuple):
        filled = tuple.__new__(type(sequence), mapped)
        if attributes := getattr(sequence, "__dict__", None):
            filled.__dict__.update(attributes)
        return filled
    filled = _copy(sequence)
    filled[:] = mapped
    return filled


def _map_attributes(function: Callable[[Any], Any], instance: Any) -> Any:
    """Map a dataclass or attrs class: its fields, and attributes that it computed from them."""
    fields = getattr(instance, "__dataclass_fields__", None)
    names = fields or [field.name for field in type(instance).__attrs_attrs__]
    before = {
        name: getattr(instance, name)
        for name in dict.fromkeys([*names, *getattr(instance, "__dict__", ())])
        if hasattr(instance, name)
    }
    mapped = {name: function(value) for name, value in before.items()}
    changed = {name: value for name, value in mapped.items() if value is not before[name]}
    if not changed:
        return instance
    filled = _copy(instance)
    for name, value in changed.items():
        object.__setattr__(filled, name, value)  # sets attributes of frozen classes too
    return filled


def _has_to(data: Any) -> bool:
    try:
        return callable(getattr(data, "to", None)) and not isinstance(data, type)
    except KeyError:  # a dict with items as attributes
        return False


def _copy(container: Any) -> Any:
    try:
        return copy.copy(container)
    except Exception as error:
        raise UserCodeError(
            f"copy.copy() of a {type(container).__name__}, whose tensors are to be moved, "
            f"converted or gathered, raised {type(error).__name__}: {error}: give the class a "
            "method __copy__"
        ) from error


def _rebuild(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a read-only mapping of the same class with other items."""
    kind: Any = type(mapping)
    try:
        filled = kind(items)
        complete = len(filled) == len(items)
    except Exception:
        complete = False
    if not complete:
        raise UserCodeError(
            f"a {kind.__name__} is a read-only mapping, and {kind.__name__}(items) does not make "
            "one with other items: let the class take a dict, or give it a method __setitem__"
        )
    return filled


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
