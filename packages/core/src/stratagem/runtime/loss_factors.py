"""Factors of losses with different weights, such as means over different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.interfaces.ranks import Ranks


def loss_factors(ranks: Ranks, weights: Sequence[float]) -> list[float | Tensor]:
    """Return the factor of each loss in an optimizer step; called on every rank, once in a step.

    Let each loss be a mean over `weight` elements. Strategies sum gradients over micro-batches and
    average them over the value groups of the ranks. The gradient of `sum(factor * loss)` then
    equals that of the mean over the elements of all micro-batches of all ranks:
    `factor = weight * number of value groups / sum of the weights of these groups`.

    Several ranks exchange one number. No device is synchronized.

    Args:
        ranks: the ranks that train together. Ranks of one value group have the same weights.
        weights: the weight of each of this rank's losses.

    Returns:
        The factors. A weight of 0 has the number 0.0 as its factor.
    """
    total: float | Tensor = float(sum(weights))
    if ranks.world_size > 1:
        # On the device at once: XLA would compile a number into each step's program.
        is_wide = str(ranks.device).startswith(("cpu", "cuda"))  # others may have no float64
        share = torch.tensor(total / ranks.value_copies, dtype=torch.float64 if is_wide else None)
        total = ranks.all_reduce(share.to(ranks.device, non_blocking=True), "sum")
    return [weight * len(ranks.value_groups) / total if weight else 0.0 for weight in weights]


def weighted(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Return a loss times its factor; 0 for a factor of 0.0, also if the loss is NaN.

    A mean over no elements is NaN, and NaN times 0 is NaN. The gradients are 0 in both cases.
    """
    if factor.__class__ is float and factor == 0.0:
        loss = loss.nan_to_num(0.0, 0.0, 0.0)
    return loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor)
