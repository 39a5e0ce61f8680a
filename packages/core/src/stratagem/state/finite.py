"""Whether the weights that are saved are finite: nobody can train on from NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from stratagem.state.shards import Shards

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def first_nonfinite(state: Mapping[str, Any], trained: Set[str]) -> str:
    """Return the name of the first tensor that training has broken, or "".

    That is one with NaN in it, or with an infinity if it is trained: a buffer may hold infinities
    for good reasons, such as a causal mask. Each tensor is read once, where it is, which takes half
    as long as copying it; a device is waited for twice for each dtype.

    Args:
        state: tensors or `Shards` by name; anything else is passed over.
        trained: names of those that the optimizer changes.

    Example:
        >>> import torch
        >>> from stratagem.state.finite import first_nonfinite
        >>> mask = torch.tensor([0.0, -torch.inf])
        >>> first_nonfinite({"mask": mask, "weight": torch.ones(2)}, {"weight"})
        ''
        >>> first_nonfinite({"mask": mask, "weight": mask}, {"weight"})
        'weight'
    """
    extremes: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
    for name, value in state.items():
        for tensor in _tensors(value):
            low, high = torch.aminmax(tensor)  # of a tensor with NaN, both are NaN
            extremes.setdefault((tensor.device, tensor.dtype), []).append((name, low, high))
    broken: set[str] = set()
    for of_kind in extremes.values():
        names, lows, highs = zip(*of_kind, strict=True)
        low, high = torch.stack(lows), torch.stack(highs)
        nan, infinite = low.isnan().tolist(), (low.isinf() | high.isinf()).tolist()
        broken.update(name for name, is_nan in zip(names, nan, strict=True) if is_nan)
        infinities = {name for name, is_inf in zip(names, infinite, strict=True) if is_inf}
        broken.update(trained & infinities)
    return next((name for name in state if name in broken), "")


def _tensors(value: Any) -> Iterator[Tensor]:
    for tensor in [chunk for _, chunk in value.chunks] if isinstance(value, Shards) else [value]:
        # A subclass may hold its values in any form.
        if (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.dtype in _DTYPES
            and tensor.numel()
            and tensor.device.type != "meta"
        ):
            yield tensor.detach()
