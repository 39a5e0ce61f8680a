"""LossWeights: weighs the micro-batches of a step by the model's `loss_weight`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.runtime.loss_factors import loss_factors
from stratagem.trainer.step.contract_check import taken_as_a_whole

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.module import Module
    from stratagem.plan.plan import RunPlan


def defines_loss_weight(module: Module) -> bool:
    """Return whether the class of a model has the method `loss_weight`.

    Module does not define it: a parameter or a layer of the user may have that name.
    """
    return isfunction(getattr(type(module), "loss_weight", None))


def check_loss_weight(module: Module, strategy: Strategy, plan: RunPlan) -> None:
    """Check that the losses of a model with `loss_weight` can be weighted, before training.

    Raises:
        ConfigurationError: the model steps its optimizers itself, or the strategy runs the step as
            a whole or divides batches itself.
    """
    if not defines_loss_weight(module):
        return
    problem = "" if strategy.opens_micro_batches else taken_as_a_whole(strategy, plan)
    if not module.automatic_optimization:
        problem = "automatic_optimization is False, so that training_step has to weight its losses"
    elif plan.capabilities.one_process and len(plan.devices) > 1:
        problem = f"the strategy {plan.strategy.name!r} divides each batch over devices"
    if problem:
        raise ConfigurationError(
            f"{type(module).__name__} defines loss_weight, which cannot be used: {problem}. Remove "
            "or rename the method, or train with strategy='ddp' and automatic optimization"
        )


class LossWeights:
    """The factors of the losses of each step, by the model's `loss_weight`.

    Args:
        module: a model that defines `loss_weight`.
        ranks: the ranks that train together.
    """

    def __init__(self, module: Module, ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks

    def __call__(
        self, micro_batches: Sequence[Any], joined: Sequence[float] | None
    ) -> list[float | Tensor]:
        """Return the factor of each micro-batch's loss, to be divided by their number.

        Args:
            micro_batches: this rank's micro-batches of a step, as the loader yields them.
            joined: the weights by which ranks with fewer batches take part; 0: a repeated batch.

        Raises:
            UserCodeError: a weight is not a finite number of at least 0.
        """
        repeated = [weight == 0 for weight in joined or [1.0] * len(micro_batches)]
        pairs = zip(micro_batches, repeated, strict=True)
        weights = [0.0 if skips else self._weight(batch) for batch, skips in pairs]
        count = len(micro_batches)
        return [count * factor for factor in loss_factors(self._ranks, weights)]

    def _weight(self, batch: Any) -> float:
        module: Any = self._module
        value = module.loss_weight(batch)
        is_number = isinstance(value, (int, float)) or (
            isinstance(value, Tensor) and value.numel() == 1
        )
        weight = float(value) if is_number else math.nan
        if not (math.isfinite(weight) and weight >= 0):
            is_tensor = isinstance(value, Tensor) and value.numel() != 1
            shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
            raise UserCodeError(
                f"{type(module).__name__}.loss_weight returned {shown}; expected a finite number "
                "of at least 0, such as the number of elements that the loss is a mean of"
            )
        return weight
