"""Gradient clipping where some parameters are sharded, over different meshes, and others whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate


def clip_by_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Clip every element of the gradients; each rank clips its own elements.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_by_value([weight], 3.5)
        >>> weight.grad
        tensor([3.0000, 3.5000])
    """
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-largest, largest)


def clip_by_norm(
    parameters: Iterable[Tensor],
    largest: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: tuple[dist.ProcessGroup, torch.device] | None = None,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Clip the gradients by their norm over all ranks; return the norm, equal on every rank.

    The function of torch rejects gradients of several kinds (plain tensors, DTensors of different
    meshes). Here each rank computes the norm of its shards, and the norms are combined over the
    mesh dimensions that shard a gradient.

    Args:
        parameters: the parameters with gradients to clip.
        largest: the largest norm.
        norm_type: the order of the norm.
        error_if_nonfinite: raise an error for a norm that is not finite.
        stages: ranks with other parameters each, and the device of this rank. The norm is over
            all of these, and each of them calls the function.
        copies: the parameters with a gradient that another of these ranks counts.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is True.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_by_norm([weight], 1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    parameters = [p for p in parameters if p.grad is not None]
    total = global_norm(parameters, norm_type, stages, copies)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so it cannot be "
            "clipped: look at the loss and the learning rate, or pass error_if_nonfinite=False"
        )
    coefficient = torch.clamp(largest / (total + 1e-6), max=1.0)
    if gradients := _local_gradients(parameters):
        torch._foreach_mul_(gradients, coefficient)
    return total


def global_norm(
    parameters: Iterable[Tensor],
    norm_type: float,
    stages: tuple[dist.ProcessGroup, torch.device] | None = None,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Return the norm of the gradients over all ranks; see `clip_by_norm`.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> global_norm([weight], 2.0)
        tensor(5.)
    """
    by_ranks: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    device = torch.device("cpu")
    counted_elsewhere = {id(parameter) for parameter in copies}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        device = gradient.device
        if id(parameter) in counted_elsewhere:
            continue
        by_ranks.setdefault(_ranks_of(gradient), []).append(_local(gradient))
    is_largest = norm_type == torch.inf
    parts = []
    for groups, gradients in by_ranks.items():
        held = [gradient for gradient in gradients if gradient.numel()]
        norm = nn.utils.get_total_norm(held, norm_type) if held else gradients[0].new_zeros(())
        norm = norm if norm.dtype is torch.float64 else norm.float()
        part = norm if is_largest else norm**norm_type
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group)
        parts.append(part.to(device))
    if not parts and stages is None:
        return torch.zeros((), device=device)
    parts = parts or [torch.zeros((), device=device)]
    joined = torch.stack(parts)
    total = joined.max() if is_largest else joined.sum()
    if stages is not None:
        # Stages may have other dtypes, or no gradient, and share weights that have to stay equal.
        group, there = stages
        wide = total.to(there, torch.float64)
        dist.all_reduce(wide, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group)
        total = wide.to(total.device)
    return total if is_largest else total ** (1.0 / norm_type)


def _ranks_of(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups that a gradient is spread over."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(dim)
        for dim, placement in enumerate(gradient.placements)
        if not isinstance(placement, Replicate)
    )


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise RuntimeError(
            f"a gradient has the placements {gradient.placements}, which are not summed up yet: "
            "clip after the last backward of a step"
        )
    return gradient._local_tensor


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [_local(p.grad) for p in parameters if p.grad is not None]
