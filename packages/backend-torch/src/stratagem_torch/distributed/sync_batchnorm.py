"""Batch norm over all ranks: torch's SyncBatchNorm where it has kernels, ours elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.errors import UserCodeError


def synchronize_batch_norm(module: nn.Module, *, has_kernels: bool) -> None:
    """Compute statistics of a model's batch norm layers over all ranks; change layers in place.

    Only the class of a layer changes: parameters, buffers, hooks, names and references to layers
    stay. In training, each forward and each backward then waits for all ranks.

    Args:
        module: the model.
        has_kernels: whether `torch.nn.SyncBatchNorm` runs on the devices of training; see
            `Accelerator.sync_batchnorm_kernels`.

    Raises:
        UserCodeError: a layer overrides `forward`, or its parameters are not initialized yet.

    Example:
        >>> import torch
        >>> from stratagem_torch.parallel import synchronize_batch_norm
        >>> layer = torch.nn.BatchNorm1d(2)
        >>> synchronize_batch_norm(layer, has_kernels=False)
        >>> type(layer) is torch.nn.BatchNorm1d
        False
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, _SynchronizedForward):
            name = name.removeprefix("module.")
            layer.__class__ = _synchronized_class(name, layer, has_kernels=has_kernels)
            layer.__dict__.setdefault("process_group", None)


def _synchronized_class(name: str, layer: _BatchNorm, *, has_kernels: bool) -> Any:
    kind: Any = type(layer)
    is_torchs = isinstance(layer, nn.SyncBatchNorm)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise UserCodeError(
            f"sync_batchnorm=True, but {name} is a {kind.__name__} that has seen no batch yet: run "
            "the model once on a batch before, or use a layer with a number of features"
        )
    if not is_torchs and kind.forward is not _BatchNorm.forward:
        raise UserCodeError(
            f"sync_batchnorm=True, but {name} is a {kind.__name__}, whose own forward would be "
            "lost: convert it yourself, and leave sync_batchnorm out"
        )
    if not has_kernels:
        return _of_this_kind(_SynchronizedForward, nn.BatchNorm2d if is_torchs else kind)
    if is_torchs or kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return nn.SyncBatchNorm
    return _of_this_kind(nn.SyncBatchNorm, kind)


class _SynchronizedForward(_BatchNorm):
    """The forward of a batch norm layer whose statistics are those of all ranks.

    In evaluation, and in a process group of one, it is the layer's own.
    """

    process_group: dist.ProcessGroup | None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch of shape (N, C, ...)."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        group = self.process_group or dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _NormalizeOverRanks.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group
        )
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without a momentum: the mean of all batches so far.
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class SynchronizedBatchNorm1d(_SynchronizedForward, nn.BatchNorm1d):
    """BatchNorm1d over all ranks."""


class SynchronizedBatchNorm2d(_SynchronizedForward, nn.BatchNorm2d):
    """BatchNorm2d over all ranks."""


class SynchronizedBatchNorm3d(_SynchronizedForward, nn.BatchNorm3d):
    """BatchNorm3d over all ranks."""


@cache
def _of_this_kind(forward: Any, kind: Any) -> Any:
    """Return a subclass of a batch norm class with the forward of another class."""
    for known in (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d):
        if known.__bases__ == (forward, kind):
            return known
    return type(f"Synchronized{kind.__name__}", (forward, kind), {})


class _NormalizeOverRanks(torch.autograd.Function):
    """Normalize by the mean and the variance of all ranks' batches together.

    Returns the output, and the mean, the biased variance and the number of values a channel, which
    have no gradient. The variance is taken in a second pass, around the mean of all ranks: in one
    pass (mean of squares less square of mean) float32 loses it where the mean is large.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = input if input.dtype == torch.float64 else input.float()
        channels = input.shape[1]
        over = [0, *range(2, input.dim())]
        shape = [1, channels] + [1] * (input.dim() - 2)
        own_count = values.new_tensor([input.numel() // channels])
        totals = torch.cat([values.sum(over), own_count])
        dist.all_reduce(totals, group=group)
        mean, count = totals[:-1] / totals[-1], totals[-1]
        if count <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(input.shape)} and none on the other ranks"
            )
        centred = values - mean.view(shape)
        variance = centred.square().sum(over)
        dist.all_reduce(variance, group=group)
        variance /= count
        scale = (variance + eps).rsqrt()
        normalized = centred.mul_(scale.view(shape))
        output = normalized if weight is None else normalized * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: FunctionCtx) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        over = [0, *range(2, input.dim())]
        shape = [1, input.shape[1]] + [1] * (input.dim() - 2)
        gradient = gradient.to(mean.dtype)
        normalized = (input.to(mean.dtype) - mean.view(shape)).mul_(scale.view(shape))
        # Summed on this rank: the gradients of bias and weight. Summed over all ranks: the
        # contribution of the statistics to the gradient of the input.
        own = torch.stack([gradient.sum(over), (gradient * normalized).sum(over)])
        of_input = None
        if ctx.needs_input_grad[0]:
            total = own.clone()
            dist.all_reduce(total, group=ctx.group)
            total /= count
            through = gradient - total[0].view(shape) - normalized * total[1].view(shape)
            factor = scale if weight is None else scale * weight
            of_input = (through * factor.view(shape)).to(input.dtype)
        of_weight = None if weight is None else own[1].to(weight.dtype)
        of_bias = own[0] if ctx.has_bias else None
        return of_input, of_weight, of_bias, None, None
