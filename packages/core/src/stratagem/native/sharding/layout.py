"""Between whole tensors and shards (DTensors), one tensor at a time."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def distribute_like(pattern: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has, laid out as `pattern` is.

    Nothing is communicated, and the part is a copy: neither the whole tensor nor the file that it
    is mapped from stays alive by it.
    """
    if not isinstance(pattern, DTensor) or isinstance(whole, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        pattern.shape, pattern.device_mesh, pattern.placements
    )
    part = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
    local = pattern.to_local()
    mine = torch.empty_like(local, dtype=whole.dtype)
    if mine.numel():
        mine.copy_(whole[part])
    return DTensor.from_local(
        mine,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


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
