"""Collectives over the ranks that share a layer, with the gradients of each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def copy_to_ranks(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the values, which each rank has; backward sums the gradients of the ranks."""
    return _call(_Copy, values, mesh)


def sum_of_ranks(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks; backward hands each rank the gradient of the sum."""
    return _call(_Sum, values, mesh)


def gather_from_ranks(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the parts of all ranks, joined along the last dimension."""
    return _call(_Gather, values, mesh)


def part_of_rank(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of values that each rank has, along the last dimension."""
    return _call(_Part, values, mesh)


def _call(function: type[torch.autograd.Function], values: Tensor, mesh: DeviceMesh) -> Tensor:
    result: Tensor = function.apply(values, mesh)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    """Each rank has the input; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_of_ranks(gradients[0], ctx.mesh), None


class _Sum(torch.autograd.Function):
    """The output is the sum of the inputs of the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return copy_to_ranks(gradients[0], ctx.mesh), None


class _Gather(torch.autograd.Function):
    """The output has the inputs of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(mesh.size())]
        dist.all_gather(parts, values, group=mesh.get_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return part_of_rank(gradients[0], ctx.mesh), None


class _Part(torch.autograd.Function):
    """The output is a part of the input, which each rank has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return values.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_from_ranks(gradients[0], ctx.mesh), None
