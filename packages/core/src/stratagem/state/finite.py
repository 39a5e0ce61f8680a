"""Whether the weights that are saved are finite: nobody can train on from NaN."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.state.shards import Shards

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def first_nonfinite(state: Mapping[str, Any], trained: Collection[str]) -> str:
    """Return the name of the first tensor that training has broken, or "".

    That is one with NaN in it, or with an infinity if it is trained: a buffer may hold infinities
    for good reasons, such as a causal mask. Each tensor is read once, where it is, which takes half
    as long as copying it; a device is waited for once.

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
    names: list[str] = []
    scores: list[Tensor] = []
    for name, value in state.items():
        for tensor in _tensors(value):
            low, high = torch.aminmax(tensor)  # of a tensor with NaN, both are NaN
            # 0 * inf is NaN as well.
            score = low * 0 + high * 0 if name in trained else low
            names.append(name)
            scores.append(score.to(torch.float32))
    if not scores:
        return ""
    device = scores[0].device
    broken = torch.stack([score.to(device) for score in scores]).isnan().tolist()
    return next((name for name, is_broken in zip(names, broken, strict=True) if is_broken), "")


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
