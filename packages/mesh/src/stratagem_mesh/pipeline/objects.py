"""Tensors in the objects that modules take and return, such as dataclasses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from stratagem.errors import ConfigurationError

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, slice),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, range),
)
"""Classes of values that have no tensors."""


def is_object(value: Any) -> bool:
    """Whether a leaf of a tree is an object whose tensors cross stages as those of a tuple do.

    Caches of keys and values are none: each stage has the entries of its own layers.

    Example:
        >>> from types import SimpleNamespace
        >>> is_object(SimpleNamespace(x=torch.ones(1))), is_object(torch.ones(1)), is_object("x")
        (True, False, False)
    """
    if isinstance(value, (Tensor, nn.Module, *PLAIN)) or callable(value):
        return False
    return not hasattr(value, "get_seq_length")


def crosses(value: Any) -> bool:
    """Whether the tensors of an object that a module returns can cross to another stage.

    FSDP2 follows the tensors of a dataclass since torch 2.13, and those of no other object.
    """
    version: Any = torch.__version__
    return is_dataclass(value) and bool(version >= (2, 13))


def flatten(data: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a tree, then the tensors in its objects, and the structure.

    Example:
        >>> from types import SimpleNamespace
        >>> leaves, _ = flatten([SimpleNamespace(x=torch.ones(1)), 2])
        >>> leaves[1:]
        [2, tensor([1.])]
    """
    leaves, spec = tree_flatten(data)
    inside = [tensor for leaf in leaves if is_object(leaf) for tensor in tensors_in(leaf)]
    return [*leaves, *inside], spec


def leaves_of(data: Any) -> list[Any]:
    """Return the leaves of `flatten`."""
    return flatten(data)[0]


def unflatten(given: Sequence[Any], leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return a tree with other leaves; its objects are copies if they have other tensors.

    Args:
        given: the leaves of `flatten`.
        leaves: the new leaves. A leaf in the place of an object is the object to copy.
        spec: the structure.

    Example:
        >>> from types import SimpleNamespace
        >>> leaves, spec = flatten([SimpleNamespace(x=torch.ones(1))])
        >>> unflatten(leaves, [leaves[0], torch.zeros(1)], spec)
        [namespace(x=tensor([0.]))]
    """
    count = spec.num_leaves
    changes = {
        id(before): after
        for before, after in zip(given[count:], leaves[count:], strict=True)
        if before is not after
    }
    if not changes:
        return tree_unflatten(leaves[:count], spec)
    return tree_unflatten([_with_tensors(leaf, changes) for leaf in leaves[:count]], spec)


def _with_tensors(leaf: Any, changes: Mapping[int, Any]) -> Any:
    if not is_object(leaf) or not any(id(tensor) in changes for tensor in tensors_in(leaf)):
        return leaf
    return copy_of(leaf, changes, type(leaf).__name__)


def copy_of(value: Any, changes: Mapping[int, Any], where: str) -> Any:
    """Return a copy of an object with other tensors, by their ids; modules stay the same.

    Args:
        value: the object.
        changes: the new tensors by the ids of the present tensors.
        where: the module that returns the object, for the error.

    Raises:
        ConfigurationError: it cannot be copied.
    """
    kept = {id(one): one for one in _parts(value) if isinstance(one, (Tensor, nn.Module))}
    try:
        return copy.deepcopy(value, {**kept, **changes})
    except Exception as error:
        raise ConfigurationError(
            f"{where} returns a {type(value).__name__}, which other stages cannot rebuild: "
            f"{type(error).__name__}: {error}. Expected tensors and plain data in tuples, lists, "
            "dictionaries or objects that can be copied"
        ) from error


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in containers, and in objects such as caches."""
    return [one for one in _parts(value) if isinstance(one, Tensor)]


def _parts(value: Any) -> Iterator[Any]:
    """Yield an object and all in it, each once; modules are not entered."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, PLAIN):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, (Tensor, nn.Module)):
            continue
        if isinstance(one, Mapping):
            pending += one.values()
        elif isinstance(one, (list, tuple, set, deque)):
            pending += one
        else:
            pending += getattr(one, "__dict__", {}).values()
            slots = {
                n for kind in type(one).__mro__ for n in _names(getattr(kind, "__slots__", ()))
            }
            pending += [getattr(one, name, None) for name in sorted(slots)]


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
