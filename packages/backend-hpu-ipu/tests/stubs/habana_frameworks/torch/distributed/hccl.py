"""hccl: over gloo here. It takes its place from `initialize_distributed_hpu`, and has no mean."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from simulated.process_group import _HostGroup
from torch import Tensor

from habana_frameworks import torch as sdk

_place: tuple[int, int, int] | None = None


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    global _place
    if dist.is_initialized():
        raise RuntimeError("initialize_distributed_hpu: the process group is there already")
    if sdk.is_acquired():
        raise RuntimeError("initialize_distributed_hpu: this process has taken a device already")
    if world_size is None or rank is None or local_rank is None:
        raise RuntimeError("initialize_distributed_hpu: expected all three numbers")
    if not 0 <= local_rank <= rank < world_size:
        raise RuntimeError(f"initialize_distributed_hpu: rank {rank} of {world_size}")
    _place = world_size, rank, local_rank
    sdk.calls.append(("initialize_distributed_hpu", _place))
    return _place


class _Group(_HostGroup):
    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        if options is not None and options.reduceOp == dist.ReduceOp.AVG:
            raise RuntimeError("hccl has no mean")
        sdk.calls.append(("allreduce", None))
        return super().allreduce(tensors, options)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        sdk.calls.append(("broadcast", [(str(t.dtype), t.dim()) for t in tensors]))
        return super().broadcast(tensors, options)

    def getBackendName(self) -> str:
        return "hccl"


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> _Group:
    if _place is None or _place[:2] != (size, rank):
        raise RuntimeError(f"hccl: rank {rank} of {size}, but initialize_distributed_hpu: {_place}")
    sdk.calls.append(("init_process_group", torch.accelerator.current_device_index()))
    return _Group(store, rank, size, timeout)


dist.Backend.register_backend("hccl", _create, devices=["hpu"])
