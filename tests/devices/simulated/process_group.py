"""A process group for tensors on the simulated device: gloo over their memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = torch._C._distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads that torch never calls

BACKEND = "simgloo"


def register(device_type: str) -> None:
    """Let torch.distributed know it by its name, for host memory too."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=[device_type, "cpu"])


def _all_gather(tensor: Tensor, world_size: int, group_name: str) -> Tensor:
    """Gather as DTensor's functional collectives do, which look for a group written in C++."""
    group = c10d._resolve_process_group(group_name)
    gathered = tensor.new_empty(world_size * tensor.shape[0], *tensor.shape[1:])
    group.allgather([list(gathered.chunk(world_size))], [tensor.contiguous()])
    return gathered


_functional: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "_c10d_functional", "IMPL", "PrivateUse1"
)
_functional.impl("all_gather_into_tensor", _all_gather)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _HostGroup(store, rank, size, timeout)


def _on_host(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        if not tensors.is_contiguous():
            raise ValueError("Tensors must be contiguous")  # as nccl says it
        is_host = tensors.device.type == "cpu"
        return tensors if is_host else torch.ops.simulated.host_alias(tensors)
    return [_on_host(tensor) for tensor in tensors]


class _HostGroup(_ProcessGroup):  # type: ignore[misc]
    """Each collective is done when its call returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def _run(self, name: str, outputs: Any, *arguments: Any) -> Any:
        getattr(self._gloo, name)(_on_host(outputs), *arguments).wait()
        return self._done(outputs)

    def _done(self, outputs: Any) -> Any:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(outputs)
        return c10d._create_work_from_future(done)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        return self._run("allreduce", list(tensors), options)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceCoalescedOptions()
        return self._run("allreduce_coalesced", list(tensors), options)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        options = options or dist.BroadcastOptions()
        return self._run("broadcast", list(tensors), options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        options = options or c10d.AllgatherOptions()
        return self._run("allgather", outputs, _on_host(inputs), options)

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        options = options or c10d.AllgatherOptions()
        return self._run("_allgather_base", output, _on_host(own), options)

    def _reduce_scatter_base(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        options = options or dist.ReduceScatterOptions()
        return self._run("_reduce_scatter_base", output, _on_host(own), options)

    # Their names since torch 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def gather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        options = options or dist.GatherOptions()
        return self._run("gather", outputs, _on_host(inputs), options)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        options = options or dist.ScatterOptions()
        return self._run("scatter", outputs, _on_host(inputs), options)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return self._done([])

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
