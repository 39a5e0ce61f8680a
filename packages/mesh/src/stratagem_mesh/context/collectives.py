"""Differentiable exchanges between the ranks that share a sequence.

The gradients of parameters are averaged over these ranks, and a rank in a region computes the
gradient of its part alone: in regions all gradients are multiplied by the number of ranks.

- `cut` begins a region, and divides the gradients of its parts by the number of ranks.
- `gather` ends a region, and multiplies the gradient by the number of ranks.
- `exchange` and `gather_keys` stay inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a sequence, in its order.

    Attributes:
        group: their process group.
        rank: the index of this rank among them.
        size: their number.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the part of this rank; the dimension is a multiple of the number of ranks."""
        part = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * part, part)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, one after the other."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if not isinstance(tensor, FakeTensor):  # of a run without values
            dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim)

    def swap(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Send the i-th part of a dimension to rank i; return the tensors that the ranks sent."""
        parts = [part.contiguous() for part in tensor.chunk(self.size, dim)]
        received = [torch.empty_like(part) for part in parts]
        if not isinstance(tensor, FakeTensor):
            dist.all_to_all(received, parts, group=self.group)
        return received

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not isinstance(total, FakeTensor):
            dist.all_reduce(total, group=self.group)
        return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, divided: int, joined: int) -> Tensor:
        ctx.arguments = group, joined, divided
        return torch.cat(group.swap(tensor, divided), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return exchange(gradients[0], *ctx.arguments), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, dim: int) -> Tensor:
        ctx.arguments = group, dim
        return group.slice(tensor, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, dim = ctx.arguments
        return group.join(gradients[0], dim) / group.size, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, dim: int, owner: object) -> Tensor:
        ctx.arguments, ctx.owner = (group, dim), owner
        return group.join(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, dim = ctx.arguments
        return group.slice(gradients[0], dim) * group.size, None, None, None


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, dim: int) -> Tensor:
        ctx.arguments = group, dim
        return group.join(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, dim = ctx.arguments
        return torch.stack(group.swap(gradients[0], dim)).sum(0), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.sum(gradients[0]) / ctx.group.size, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, owner: object) -> Tensor:
        ctx.group, ctx.owner = group, owner
        sent = tensor if group.rank == 0 else torch.zeros_like(tensor)
        return group.sum(sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factor = ctx.group.size if ctx.group.rank == 0 else 0
        return gradients[0] * factor, None, None


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, fraction: Tensor, group: ContextGroup, owner: object
    ) -> Tensor:
        ctx.factor, ctx.owner = (fraction * group.size).to(loss.dtype), owner
        # The mean over no labels is NaN.
        return group.sum(torch.where(fraction > 0, loss * fraction, 0.0).to(loss.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None, None


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def exchange(tensor: Tensor, group: ContextGroup, divided: int, joined: int) -> Tensor:
    """Divide a dimension between the ranks, and join another one that is divided between them."""
    return _apply(_Exchange, tensor, group, divided, joined)


def cut(tensor: Tensor, group: ContextGroup, dim: int) -> Tensor:
    """Return the part of this rank of a tensor that all ranks have; begins a region."""
    return _apply(_Cut, tensor, group, dim)


def gather(tensor: Tensor, group: ContextGroup, dim: int, owner: object) -> Tensor:
    """Return the parts of all ranks, on each; ends a region. The graph keeps `owner` alive."""
    return _apply(_Gather, tensor, group, dim, owner)


def gather_keys(tensor: Tensor, group: ContextGroup, dim: int) -> Tensor:
    """Return the parts of all ranks inside a region, where each rank uses them for its part."""
    return _apply(_GatherKeys, tensor, group, dim)


def share(tensor: Tensor, group: ContextGroup) -> Tensor:
    """Return a tensor that all ranks have and use for their parts; begins a region."""
    return _apply(_Share, tensor, group)


def first(tensor: Tensor, group: ContextGroup, owner: object) -> Tensor:
    """Return the tensor of the first rank on each; ends a region."""
    return _apply(_First, tensor, group, owner)


def sum_of_losses(loss: Tensor, fraction: Tensor, group: ContextGroup, owner: object) -> Tensor:
    """Return the sum of the ranks' losses times their fractions, on each; ends a region."""
    return _apply(_SumOfLosses, loss, fraction, group, owner)
