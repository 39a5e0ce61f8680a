"""Loss parallelism: the cross entropy of logits of which each rank has a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from stratagem.errors import UserCodeError


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy`, also of logits that ranks have parts of.

    A layer with the style "colwise_vocabulary" in `MeshStrategy(tensor_plan=)` gives each rank a
    part of the logits in training, as a DTensor. Their loss is computed from the parts: ranks
    exchange three numbers for each target, and no rank has all logits.

    Args:
        logits: (targets, classes), or (batch, classes, ...); dimensions can be viewed and joined
            before.
        target: the index of a class for each target.
        ignore_index: targets with this index have no loss.
        reduction: the name of a reduction, as in torch.

    Raises:
        UserCodeError: the logits are divided along another dimension than the classes.

    Example:
        >>> import torch
        >>> from stratagem_mesh import cross_entropy
        >>> loss = cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
        >>> round(loss.item(), 4)
        1.3863
    """
    if not isinstance(logits, DTensor):
        return functional.cross_entropy(
            logits, target, ignore_index=ignore_index, reduction=reduction
        )
    dim = min(1, logits.ndim - 1)
    if tuple(logits.placements) != (Shard(dim),) or target.is_floating_point():
        raise UserCodeError(
            f"cross_entropy received logits of {tuple(logits.shape)} with {logits.placements} and "
            f"a target of {target.dtype}: expected logits whose classes, dimension {dim}, are "
            "divided, and indices of classes. Join other dimensions by logits.flatten(0, 1)"
        )
    part = logits.to_local().movedim(dim, -1)
    return loss_of_parts(part, target, logits.device_mesh, ignore_index, reduction)


def loss_of_parts(
    part: Tensor, target: Tensor, mesh: DeviceMesh, ignore_index: int, reduction: str
) -> Tensor:
    """Return the cross entropy of logits with a last dimension that ranks have parts of.

    Args:
        part: this rank's part of the logits.
        target: the index of a class for each.
        mesh: the ranks.
        ignore_index: targets with this index have no loss.
        reduction: the name of a reduction, as in torch.
    """
    is_ignored = target == ignore_index
    _check_bounds(target, is_ignored, part.shape[-1] * mesh.size())
    wide = part if part.dtype == torch.float64 else part.float()
    apply: Any = _CrossEntropy.apply
    losses: Tensor = apply(
        wide.reshape(-1, part.shape[-1]), target.reshape(-1), is_ignored.reshape(-1), mesh
    )
    losses = losses.view(target.shape)
    if reduction == "mean":
        losses = losses.sum() / (~is_ignored).sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(part.dtype)


def _check_bounds(target: Tensor, is_ignored: Tensor, classes: int) -> None:
    """Raise, or stop the device, if a target is no class, as cross_entropy of torch does."""
    is_valid = (is_ignored | ((target >= 0) & (target < classes))).all()
    if target.device.type != "cpu":
        torch._assert_async(is_valid)
    elif not is_valid:
        raise IndexError(
            f"target has indices from {int(target.min())} to {int(target.max())}: expected "
            f"classes from 0 to {classes - 1}"
        )


class _CrossEntropy(torch.autograd.Function):
    """The loss of each target; keeps the probabilities of this rank's classes."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, target: Tensor, is_ignored: Tensor, mesh: DeviceMesh
    ) -> Tensor:
        width, group = part.shape[-1], mesh.get_group()
        largest = part.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        values = part - largest[:, None]
        index = target - width * mesh.get_local_rank()
        is_own = (index >= 0) & (index < width)
        index = index.clamp(0, width - 1)[:, None]
        picked = values.gather(1, index).squeeze(1).masked_fill(~is_own, 0)
        values = values.exp_()
        sums = torch.stack((values.sum(-1), picked))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(values.div_(sums[0][:, None]), index, is_own, is_ignored)
        return (sums[0].log() - sums[1]).masked_fill(is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, is_own, is_ignored = ctx.saved_tensors
        scale = gradients[0].masked_fill(is_ignored, 0)
        gradient = probabilities * scale[:, None]
        gradient.scatter_add_(1, index, -(scale * is_own)[:, None])
        return gradient, None, None, None
