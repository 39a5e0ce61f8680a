"""The forward pass of a region that runs, which attention and masks inside it read.

The process has one state, since a backward pass recomputes layers in threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stratagem.errors import UserCodeError
from stratagem_mesh.context.collectives import ContextGroup, cut, share


@dataclass(eq=False)
class Call:
    """One forward pass of a region.

    Attributes:
        name: the region, in words.
        group: the ranks that share the sequence.
        length: the number of positions.
        mask: which keys each query attends to (bool), or a term of their scores; of the whole
            sequence.
        is_causal: whether a query attends to the keys up to its own position.
        makes_masks: whether transformers makes masks from parts of the batch.
        positions: the `position_ids` of the user for it, of the whole sequence.
        weight: the fraction of the loss that this rank computes, a scalar.
    """

    name: str
    group: ContextGroup
    length: int
    mask: Tensor | None = None
    is_causal: bool = False
    makes_masks: bool = False
    positions: Tensor | None = None
    weight: Tensor | None = None

    @property
    def part(self) -> int:
        """The number of positions of a rank."""
        return -(-self.length // self.group.size)

    @property
    def total(self) -> int:
        """The number of positions, filled up to a multiple of the ranks."""
        return self.part * self.group.size

    def cut(self, tensor: Tensor, dim: int, value: float = 0) -> Tensor:
        """Return the part of this rank."""
        return cut(fill(tensor, self.total, dim, value), self.group, dim)

    def share(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is not divided."""
        return share(tensor, self.group) if tensor.requires_grad else tensor


class _Running:
    call: Call | None = None
    recomputed_by: nn.Module | None = None
    of_backward: Call | None = None
    is_active = False  # a compiled attention reads this alone


def fill(tensor: Tensor, total: int, dim: int, value: float = 0) -> Tensor:
    """Extend a dimension to a size."""
    missing = total - tensor.shape[dim]
    if not missing:
        return tensor
    sizes = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + [0, missing]
    return pad(tensor, sizes, value=value)


def divides(length: int, group: ContextGroup) -> bool:
    """Whether ranks divide a sequence; each rank computes a short sequence by itself.

    With two positions or more for each rank, the shape of a mask tells a part from the whole.
    """
    return length >= 2 * group.size


_live: WeakSet[Call] = WeakSet()


def begin(call: Call) -> None:
    """Start the forward pass."""
    _Running.call, _Running.is_active = call, True
    _live.add(call)


def end() -> None:
    """End the forward pass; until its backward pass, its layers may be recomputed."""
    _Running.call, _Running.is_active = None, False


def in_region() -> bool:
    """Whether a part of a region runs, or is recomputed."""
    return _Running.is_active


def running() -> Call | None:
    """Return the forward pass that runs, or None."""
    return _Running.call


def current(part: int) -> Call | None:
    """Return the forward pass that runs, or that a backward pass recomputes; None: a whole one.

    Args:
        part: the number of positions of the queries.

    Raises:
        UserCodeError: several forward passes match the recomputed layer, and differ.
    """
    return _Running.call if _Running.call is not None else _recomputed(part)


@contextmanager
def backward_of(call: Call | None) -> Iterator[None]:
    """Name the forward pass of a backward pass, where several ones are in flight."""
    _Running.of_backward = call
    try:
        yield
    finally:
        _Running.of_backward = None


def _recomputed(part: int) -> Call | None:
    call = _Running.of_backward
    if call is not None:
        return call if call.part == part else None
    found = [call for call in _live if call.part == part]
    kinds = {(call.length, id(call.mask), call.is_causal) for call in found}
    if len(kinds) > 1:
        raise UserCodeError(
            f"activation checkpointing recomputes a layer of {part} positions, and there are "
            f"{len(kinds)} different forward passes that it may belong to: expected one backward "
            "pass after each forward pass with a mask. Call manual_backward for each, pass the "
            "same mask to both, or train without activation checkpointing"
        )
    return found[0] if found else None


def watch_recomputing(module: nn.Module) -> list[Any]:
    """Let the layers of a region run as its parts when a backward pass recomputes them."""
    handles: list[Any] = []
    for part in module.modules():
        if any(True for _ in part.children()):
            handles.append(part.register_forward_pre_hook(_begin_again))
            handles.append(part.register_forward_hook(_end_again, always_call=True))
    return handles


def watch_repeated(module: nn.Module) -> None:
    """Let forwards of a region run as its parts when a backward pass repeats them.

    `apply_activation_checkpointing` repeats the forward of a module without the module's hooks.
    """
    for part in module.modules():
        forward = vars(part).get("forward")
        repeated = getattr(forward, "forward_to_repeat", None)
        if repeated is not None and not isinstance(repeated, _Repeated):
            forward.forward_to_repeat = _Repeated(part, repeated)  # type: ignore[union-attr]


class _Repeated:
    """Takes the place of a forward; an object, which is copied together with its module."""

    def __init__(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        self._part = part
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _begin_again(self._part, args)
        try:
            return self._forward(*args, **kwargs)
        finally:
            _end_again(self._part, args, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin_again(module: nn.Module, inputs: Any) -> None:
    is_outside = _Running.call is None and _Running.recomputed_by is None
    if is_outside and torch._C._current_graph_task_id() != -1:
        _Running.recomputed_by, _Running.is_active = module, True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_again(module: nn.Module, inputs: Any, output: Any) -> None:
    if _Running.recomputed_by is module:
        _Running.recomputed_by, _Running.is_active = None, False
