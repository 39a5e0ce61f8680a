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


def gather_parts(part: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
    """Return the sequence that ranks have parts of; backward sums the gradients of the ranks.

    Args:
        part: this rank's part of the sequence, dimension 1.
        mesh: the ranks.
        length: the number of positions; further ones fill the last parts.
    """
    return _call(_GatherParts, part, mesh, length)


def sum_to_parts(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of the sequence (dimension 1) of the sum over ranks."""
    return _call(_SumToParts, values, mesh)


def cut_parts(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a sequence (dimension 1) that each rank has.

    If it does not divide, its last position is repeated, so that no norm reads zeros.
    """
    return _call(_CutParts, values, mesh, True)


def join_parts(part: Tensor, mesh: DeviceMesh, length: int, owner: object = None) -> Tensor:
    """Return the sequence that ranks have parts of; each rank uses it in the same way.

    The graph keeps `owner` alive.
    """
    return _call(_JoinParts, part, mesh, length, owner)


def part_length(length: int, mesh: DeviceMesh) -> int:
    """Return the number of positions of a rank's part."""
    return -(-length // mesh.size())


def _call(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
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


class _GatherParts(torch.autograd.Function):
    """The output has the parts of all ranks; its gradient is a part of the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
        ctx.mesh = mesh
        return _joined(part, mesh, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return sum_to_parts(gradients[0], ctx.mesh), None, None


class _SumToParts(torch.autograd.Function):
    """The output is a part of the sum of the inputs of the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.length = mesh, values.shape[1]
        parts = [part.contiguous() for part in _filled(values, mesh).chunk(mesh.size(), dim=1)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=mesh.get_group())
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_parts(gradients[0], ctx.mesh, ctx.length), None


class _CutParts(torch.autograd.Function):
    """The output is a part of the input, which each rank has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: DeviceMesh, repeats: bool) -> Tensor:
        ctx.mesh, ctx.length = mesh, values.shape[1]
        filled = _filled(values, mesh, repeats=repeats)
        return filled.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return join_parts(gradients[0], ctx.mesh, ctx.length), None, None


class _JoinParts(torch.autograd.Function):
    """The output has the parts of all ranks; each rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, length: int, owner: object) -> Tensor:
        ctx.mesh, ctx.owner = mesh, owner
        return _joined(part, mesh, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _call(_CutParts, gradients[0], ctx.mesh, False), None, None, None


def _filled(values: Tensor, mesh: DeviceMesh, *, repeats: bool = False) -> Tensor:
    """Extend a sequence until it divides between ranks, by its last position or by zeros."""
    missing = part_length(values.shape[1], mesh) * mesh.size() - values.shape[1]
    if not missing:
        return values
    shape = values.shape[0], missing, *values.shape[2:]
    last = values[:, -1:].expand(shape) if repeats else values.new_zeros(shape)
    return torch.cat((values, last), dim=1)


def _joined(part: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts, dim=1)[:, :length].contiguous()
