"""Between whole tensors and shards (DTensors), one tensor at a time."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem.state.shards import LazyTensor, Shards


def distribute_like(pattern: Tensor, whole: Tensor | LazyTensor) -> Tensor:
    """Return a tensor sharded as `pattern` is.

    Nothing is communicated, and this rank's chunk is a copy: neither the whole tensor nor the file
    that it is mapped from stays alive by it.

    Args:
        pattern: a parameter, sharded or not.
        whole: of the same shape; every rank has it, or reads what it needs of it.
    """
    if not isinstance(pattern, DTensor):
        return whole.whole() if isinstance(whole, LazyTensor) else whole
    if isinstance(whole, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        pattern.shape, pattern.device_mesh, pattern.placements
    )
    region = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
    local = pattern.to_local()
    mine = torch.empty_like(local, dtype=whole.dtype)
    if isinstance(whole, LazyTensor):
        whole.read_into(Shards(whole.shape, whole.dtype, [(tuple(offset), mine)]))
    elif mine.numel():
        mine.copy_(whole[region])
    return DTensor.from_local(
        mine,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def shards_of(value: Any) -> Any:
    """Return what this rank holds of a sharded tensor, aliased; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    chunks = [(tuple(offset), local)] if local.numel() else []
    return Shards(tuple(value.shape), value.dtype, chunks) if value.numel() else local


@lru_cache
def _silence_advice() -> None:
    """Leave out torch's advice on gathering over two mesh dimensions, which nobody can follow."""
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
        lambda record: "sequential all_gather operations" not in record.getMessage()
    )


def whole_on_cpu(value: Any) -> Any:
    """Return a whole copy of a tensor on the CPU; every rank takes part.

    What is no tensor is returned as it is.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        _silence_advice()
        value = value.full_tensor()
    # A tensor that is not spread over ranks comes back as the live one.
    return value.to("cpu", copy=True)
