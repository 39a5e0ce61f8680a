"""Attention over a sequence of which each rank has a part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import UserCodeError
from stratagem_mesh.context.call import Call, current, fill, in_region, running
from stratagem_mesh.context.collectives import exchange, gather_keys

_original = nn.functional.scaled_dot_product_attention
_original_forward = nn.MultiheadAttention.forward


_comparing: list[None] = []
"""Not empty: attention drops nothing, as where its outputs are compared."""


@contextmanager
def without_dropout() -> Iterator[None]:
    """Switch off the dropout of attention, also where files have imported it by name."""
    _comparing.append(None)
    try:
        yield
    finally:
        _comparing.pop()


def install(region: nn.Module) -> None:
    """Replace torch's attention by one that knows of regions; elsewhere it calls torch's.

    Files of the region's modules that have imported it by name have it replaced there too.
    """
    nn.functional.scaled_dot_product_attention = attend
    nn.MultiheadAttention.forward = _forward  # type: ignore[method-assign,assignment]
    files = {kind.__module__ for part in region.modules() for kind in type(part).__mro__}
    for file in files:
        names = vars(sys.modules[file]) if file in sys.modules else {}
        for name in [name for name, value in names.items() if value is _original]:
            names[name] = attend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """See `torch.nn.functional.scaled_dot_product_attention`."""
    if _comparing:
        dropout_p = 0.0
    if not in_region():
        return _original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options = {"dropout_p": dropout_p, "scale": scale}
    tensors = query, key, value
    attended: Tensor = _attend_in_region(tensors, attn_mask, is_causal, options, enable_gqa)
    return attended


@wraps(_original_forward)
def _forward(layer: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
    """Attend; outside of graphs in a region.

    A compiler takes torch's function of this layer as one operation. It would call the attention
    above at compile time, and keep the forward pass that runs then.
    """
    if not in_region():
        return _original_forward(layer, *args, **kwargs)
    refuse_weights(args[4] if len(args) > 4 else kwargs.get("need_weights", True))
    return _not_compiled(layer, *args, **kwargs)


def refuse_weights(is_asked: bool) -> None:
    """Refuse the weights of attention in a region, where a rank has those of its part."""
    call = running()
    if is_asked and call is not None:
        raise UserCodeError(
            f"{call.name} asks nn.MultiheadAttention for its weights, and ranks divide its "
            "sequence: expected need_weights=False"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _not_compiled(*args: Any, **kwargs: Any) -> Any:
    return _original_forward(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_in_region(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
    enable_gqa: bool,
) -> Tensor:
    query, key, _ = tensors
    call = current(query.shape[-2])
    if call is None:
        return _original(*tensors, mask, is_causal=is_causal, enable_gqa=enable_gqa, **options)
    _check_shapes(call, query, key)
    mask, is_causal = _whole_mask(call, mask, is_causal, query.device)
    if query.shape[-3] % call.group.size:
        return _by_keys(call, tensors, mask, is_causal, options, enable_gqa)
    return _by_heads(call, tensors, mask, is_causal, options)


def _by_heads(
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
) -> Tensor:
    """Compute some of the heads over the whole sequence (Ulysses)."""
    query, key, value = tensors
    key, value = (_repeat_heads(t, query.shape[-3], call.group.size) for t in (key, value))
    query, key, value = (exchange(t, call.group, -3, -2) for t in (query, key, value))
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = call.group.slice(mask, -3)
    is_grouped = query.shape[-3] != key.shape[-3]
    whole = _original(
        query, key, value, mask, is_causal=is_causal, enable_gqa=is_grouped, **options
    )
    return exchange(whole, call.group, -2, -3)


def _by_keys(
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
    enable_gqa: bool,
) -> Tensor:
    """Compute all heads for the queries of this rank, over the keys and values of all."""
    query, key, value = tensors
    key, value = (gather_keys(t, call.group, -2) for t in (key, value))
    if is_causal:
        mask = causal(call.total, query.device)
    if mask is not None and mask.shape[-2] > 1:
        mask = call.group.slice(mask, -2)
    return _original(query, key, value, mask, enable_gqa=enable_gqa, **options)


def _repeat_heads(tensor: Tensor, heads: int, size: int) -> Tensor:
    """Repeat heads of keys, as often as it takes to divide them between ranks."""
    own = tensor.shape[-3]
    times = next(n for n in range(1, heads // own + 1) if not own * n % size)
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


def causal(length: int, device: torch.device) -> Tensor:
    """Return the mask in which each query attends to the keys up to its own position."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the intersection of two masks; masks of other types than bool are added to scores."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    return _added(first, second) + _added(second, first)


def _added(mask: Tensor, other: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=other.dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf"))


def _check_shapes(call: Call, query: Tensor, key: Tensor) -> None:
    lengths = query.shape[-2], key.shape[-2]
    if query.ndim < 3 or lengths != (call.part, call.part):
        raise UserCodeError(
            f"{call.name} attends from {lengths[0]} to {lengths[1]} positions in "
            f"{query.ndim} dimensions: expected {call.part} and {call.part}, the part of a rank, "
            "in 3 or more. Attention between two sequences, or over part of one, cannot be divided "
            "here: leave the module out of context_modules"
        )


def _whole_mask(
    call: Call, mask: Tensor | None, is_causal: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return the mask over the whole sequence, and whether the causal one replaces it."""
    if mask is None:
        mask, is_causal = call.mask, is_causal or call.is_causal
    elif mask.requires_grad:
        raise UserCodeError(
            f"{call.name} adds a learned bias to attention scores, whose gradient is that of a "
            "part: context parallelism cannot divide it; pass context=1"
        )
    elif mask.shape[-1] == call.part and mask.shape[-2] == 1:
        mask = call.group.join(mask, mask.ndim - 1)
    elif tuple(mask.shape[-2:]) == (call.part, call.part) and _is_causal(mask):
        mask, is_causal = None, True
    elif mask.shape[-1] not in (call.length, call.total) or call.part in mask.shape[-2:]:
        raise UserCodeError(
            f"{call.name} made a mask of shape {tuple(mask.shape)} from its part of the sequence, "
            f"which says nothing of the other parts: expected a mask of {call.length} x "
            f"{call.length} positions as an input of the module, or is_causal=True in "
            "scaled_dot_product_attention"
        )
    if call.total == call.length:
        return mask, is_causal and mask is None
    if is_causal and mask is None:  # the positions that were added are the last ones
        return None, True
    return _filled(call, mask, device), False


def _is_causal(mask: Tensor) -> bool:
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (allowed | (mask <= torch.finfo(mask.dtype).min)).all():
        return False
    return bool((allowed == causal(mask.shape[-1], mask.device)).all())


def _filled(call: Call, mask: Tensor | None, device: torch.device) -> Tensor:
    """Extend a mask: no query attends to added keys; the outputs of added queries are not used."""
    if mask is None:
        mask = torch.ones(1, call.length, dtype=torch.bool, device=device)
    is_bool = mask.dtype == torch.bool
    if mask.shape[-2] == call.length:
        mask = fill(mask, call.total, -2, True if is_bool else 0.0)
    keys = mask.narrow(-1, 0, call.length)
    return fill(keys, call.total, -1, False if is_bool else float("-inf"))
