"""Marks of divided tensors, and the effect of operations on them.

A dimension of size `outer * ranks * inner` is divided in its middle factor. Blocks of whole heads
stay together through views. An operation either moves the mark of its inputs to a dimension of its
output, or needs a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mark:
    """A tensor is divided along a dimension.

    Attributes:
        layers: the layers that the features come from.
        dim: the dimension, from the left.
        outer: the number of packs, each of which is divided.
        inner: the number of elements in a block.
    """

    layers: frozenset[str]
    dim: int
    outer: int
    inner: int

    def moved(self, dim: int) -> Mark:
        """Return the mark of another dimension."""
        return replace(self, dim=dim)


class WholeNeededError(Exception):
    """An operation has no result that is divided."""


Marked = Sequence[tuple[Tensor, Mark]]
Rule = Callable[..., "Mark | None"]


def viewed(mark: Mark, before: Sequence[int], after: Sequence[int], ranks: int) -> Mark:
    """Return the mark of a view to another shape.

    Raises:
        WholeNeededError: a block would be spread over a dimension that cannot be divided.
    """
    leading = prod(before[: mark.dim]) * mark.outer
    block = mark.inner * prod(before[mark.dim + 1 :])
    for dim in range(len(after)):
        front, rest = prod(after[:dim]), prod(after[dim + 1 :])
        if not front or not rest or leading % front or block % rest:
            continue
        outer, inner = leading // front, block // rest
        if outer * ranks * inner == after[dim]:
            return Mark(mark.layers, dim, outer, inner)
    raise WholeNeededError(f"a view of {tuple(before)} as {tuple(after)} splits blocks")


def pointwise(marked: Marked, tensors: Sequence[Tensor], shape: Sequence[int]) -> Mark:
    """Return the mark of an operation on each element, with broadcasting.

    Raises:
        WholeNeededError: an operand is whole along the divided dimension.
    """
    first, mark = marked[0]
    position = mark.dim - first.ndim
    names = frozenset().union(*(m.layers for _, m in marked))
    for tensor, other in marked[1:]:
        same = other.dim - tensor.ndim == position
        if not same or (other.outer, other.inner) != (mark.outer, mark.inner):
            raise WholeNeededError("operands are divided in different ways")
    known = {id(tensor) for tensor, _ in marked}
    for tensor in tensors:
        if id(tensor) not in known and tensor.ndim >= -position and tensor.shape[position] != 1:
            raise WholeNeededError("an operand has all the features")
    return Mark(names, len(shape) + position, mark.outer, mark.inner)


def _same(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    return mark


def _transpose(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    one, other = (dim % tensor.ndim for dim in args[1:3])
    return mark.moved({one: other, other: one}.get(mark.dim, mark.dim))


def _t(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    return mark.moved(tensor.ndim - 1 - mark.dim)


def _permute(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    return mark.moved([dim % tensor.ndim for dim in args[1]].index(mark.dim))


def _unsqueeze(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    return mark.moved(mark.dim + (args[1] % out.ndim <= mark.dim))


def _squeeze(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    given = args[1] if len(args) > 1 else range(tensor.ndim)
    dims = {dim % tensor.ndim for dim in ([given] if isinstance(given, int) else given)}
    gone = sum(dim < mark.dim and tensor.shape[dim] == 1 for dim in dims)
    return mark.moved(mark.dim - gone)


def _expand(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    return mark.moved(mark.dim + out.ndim - tensor.ndim)


def _repeat(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    moved = mark.moved(mark.dim + out.ndim - tensor.ndim)
    if out.shape[moved.dim] != tensor.shape[mark.dim]:
        raise WholeNeededError("divided features are repeated")
    return moved


def _along(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    """Return the mark where an operation cuts or orders along a dimension."""
    dim = (args[1] if len(args) > 1 else 0) % tensor.ndim
    if dim == mark.dim and out.shape != tensor.shape:
        raise WholeNeededError("divided features are cut")
    return mark


def _softmax(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    if args[1] % tensor.ndim == mark.dim:
        raise WholeNeededError("an operation reduces divided features")
    return mark


def _select(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    dim = (args[1] if len(args) > 1 else 0) % tensor.ndim
    if dim == mark.dim:
        raise WholeNeededError("one of the divided features is taken")
    return mark.moved(mark.dim - (dim < mark.dim))


def _split(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    dim = (args[2] if len(args) > 2 else 0) % tensor.ndim
    if dim != mark.dim:
        return mark
    if out.shape[dim] * mark.outer != tensor.shape[dim]:
        raise WholeNeededError("divided features are cut")
    return replace(mark, outer=1)


def _reduce(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    given = args[1] if len(args) > 1 and args[1] is not None else list(range(tensor.ndim))
    dims = {dim % tensor.ndim for dim in ([given] if isinstance(given, int) else given)}
    if mark.dim in dims or not dims:
        raise WholeNeededError("an operation reduces divided features")
    keeps = out.ndim == tensor.ndim
    return mark if keeps else mark.moved(mark.dim - sum(dim < mark.dim for dim in dims))


def _norm(mark: Mark, tensor: Tensor, args: Sequence[Any], out: Tensor) -> Mark:
    if mark.dim >= tensor.ndim - len(args[1]):
        raise WholeNeededError("an operation reduces divided features")
    return mark


ONE_INPUT: dict[str, Rule] = {
    **dict.fromkeys(
        ("clone", "detach", "alias", "_to_copy", "lift_fresh", "native_dropout", "bernoulli_"),
        _same,
    ),
    **dict.fromkeys(
        ("empty_like", "zeros_like", "ones_like", "rand_like", "full_like", "triu", "tril"), _same
    ),
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "slice": _along,
    "select": _select,
    "unbind": _select,
    "split": _split,
    "split_with_sizes": _split,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "logsumexp"), _reduce),
    "linalg_vector_norm": lambda m, t, args, out: _reduce(m, t, (t, *args[2:]), out),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
}
"""The mark of the output of an operation on one divided tensor, by its name."""

VIEWS = "view", "_unsafe_view", "reshape", "_reshape_alias"


def product(name: str, args: Sequence[Any], find: Callable[[Tensor], Mark | None]) -> Mark:
    """Return the mark of a product of matrices (mm, bmm), alone or in a batch.

    Raises:
        WholeNeededError: the contracted dimension is divided, or only one operand has a divided
            batch.
    """
    left, right = args[-2:]
    a, b = find(left), find(right)
    batch = left.ndim - 2
    if a is not None and b is not None:
        same = a.dim == b.dim < batch and (a.outer, a.inner) == (b.outer, b.inner)
        if same:
            return replace(a, layers=a.layers | b.layers)
    elif a is not None and a.dim == batch and not right.requires_grad:
        return a
    elif b is not None and b.dim == batch + 1 and not left.requires_grad:
        return b
    raise WholeNeededError("a product of matrices contracts divided features")


def attention(args: Sequence[Any], find: Callable[[Tensor], Mark | None]) -> Mark:
    """Return the mark of attention with divided heads.

    Raises:
        WholeNeededError: not all of queries, keys and values are divided by heads.
    """
    marks = [find(tensor) for tensor in args[:3]]
    names: frozenset[str] = frozenset()
    for tensor, mark in zip(args[:3], marks, strict=True):
        if mark is None or mark.dim != tensor.ndim - 3 or mark.outer != 1:
            raise WholeNeededError("queries, keys and values are not all divided by heads")
        names |= mark.layers
    for mask in args[3:]:
        if isinstance(mask, Tensor) and (
            mask.requires_grad or (mask.ndim > 2 and mask.shape[-3] != 1)
        ):
            raise WholeNeededError("the mask or bias of attention differs by head")
    assert marks[0] is not None
    return replace(marks[0], layers=names)


def is_pointwise(function: Any) -> bool:
    """Whether an operation computes each element from the elements at its place."""
    return torch.Tag.pointwise in function.tags
