"""Parameters that cannot be sharded, since they have no dimension: whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def find_replicated(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without a dimension, such as a learned temperature."""
    return [p for p in module.parameters() if p.ndim == 0]


def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0, in place."""
    for tensor in tensors:
        values = tensor.detach()
        whole = values.contiguous()
        dist.broadcast(whole, 0)
        if whole is not values:
            values.copy_(whole)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients by their mean over ranks, in one collective.

    A rank that did not use a parameter counts as a zero; one that nobody used stays without a
    gradient. What is an average already stays what it is, so that gradients may be accumulated
    with and without this.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if not wanted:
        return
    device = wanted[0].device
    message = torch.zeros(2, len(wanted), dtype=torch.float32, device=device)
    for index, parameter in enumerate(wanted):
        if parameter.grad is not None:
            message[0, index] = parameter.grad
            message[1, index] = 1.0
    dist.all_reduce(message)
    users = message[1].tolist()
    world_size = dist.get_world_size()
    for index, parameter in enumerate(wanted):
        if not users[index]:
            continue
        mean = (message[0, index] / world_size).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = mean.clone()
        else:
            parameter.grad.copy_(mean)
