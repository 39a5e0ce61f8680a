"""Differentiable exchanges between the ranks that divide experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that divide the experts of a model, in the order of the experts.

    Attributes:
        group: their process group.
        size: their number.
        has_values: whether they exchange values; ranks of a plan do not.
    """

    group: dist.ProcessGroup
    size: int
    has_values: bool = True

    def __deepcopy__(self, memo: object) -> ExpertGroup:
        return self

    def swap(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the next `sent[i]` rows to rank i; return the `received[i]` rows of each rank."""
        made = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(
            made, tensor.contiguous(), list(received), list(sent), group=self.group
        )
        return made

    def counts(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Exchange the numbers of rows that ranks send for each expert.

        The host waits for the device once, here, since it sizes the received tensors.

        Args:
            counts: the number of rows for each expert of all ranks.

        Returns:
            The numbers that each rank sends to each expert of this one, and the rows sent to and
            received from each rank.
        """
        local = counts.numel() // self.size
        if not self.has_values:  # unknown: as if all experts were used alike
            return counts.view(self.size, local), [], []
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        received = received.view(self.size, local)
        rows = torch.stack([counts.view(self.size, local).sum(1), received.sum(1)]).tolist()
        return received, rows[0], rows[1]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ExpertGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.arguments = group, received, sent
        return group.swap(tensor, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, sent, received = ctx.arguments
        return group.swap(gradients[0], sent, received), None, None, None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, size: int) -> Tensor:
        ctx.size = size
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / ctx.size, None


def swap(tensor: Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> Tensor:
    """Exchange rows, as `ExpertGroup.swap` does; gradients go back the same way."""
    result: Tensor = _Swap.apply(tensor, group, sent, received)  # type: ignore[no-untyped-call]
    return result


def divide_gradient(parameter: Tensor, size: int) -> Tensor:
    """Return a parameter whose gradient is divided by a number."""
    result: Tensor = _Divide.apply(parameter, size)  # type: ignore[no-untyped-call]
    return result
