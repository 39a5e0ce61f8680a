"""Optimizers and scheduler configurations, parsed from the result of `configure_optimizers`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.trainer.step.contract_check import taken_as_a_whole

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.module import Module
    from stratagem.plan.plan import RunPlan
    from stratagem.plan.step_options import StepOptions
    from stratagem.trainer.context import FitState

_EXPECTED = (
    "expected an optimizer, a list of optimizers, (optimizers, schedulers), or a dict with "
    "'optimizer' and 'lr_scheduler'"
)


@dataclass
class SchedulerConfig:
    """A learning rate scheduler and the schedule of its steps.

    Attributes:
        scheduler: a scheduler of torch, or an object with `step` and `state_dict`.
        interval: "epoch" or "step".
        frequency: the number of intervals between two steps of the scheduler.
        monitor: the name of the logged value for the scheduler's `step`. None: no value.
        name: the name of the learning rate in LearningRateMonitor.
        strict: if True, a missing value is an error. If False, a missing value causes a warning,
            and the scheduler does not step.
        reduce_on_plateau: whether the scheduler's `step` takes a value.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False

    def is_due(self, interval: str, count: int) -> bool:
        """Return whether it steps after the `count`-th epoch or step (from 1)."""
        return self.interval == interval and count % self.frequency == 0


def configure(module: Module) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Ask a module for its optimizers and schedulers.

    Raises:
        UserCodeError: the return value has a wrong type; or has no optimizer, or several optimizers
            with automatic optimization.
    """
    returned = module.configure_optimizers()
    who = f"{type(module).__name__}.configure_optimizers()"
    optimizers: list[Any]
    schedulers: list[Any] = []
    if returned is None and not module.needs_optimizer:
        rank_zero_warn(
            f"{who} returned None: this fit will run with no optimizer. No step is taken or "
            "counted, so values of steps are not logged and no checkpoint is saved. Return an "
            "optimizer if the model is to train"
        )
        return [], []
    if isinstance(returned, Optimizer):
        optimizers = [returned]
    elif isinstance(returned, Mapping):
        optimizers, schedulers = _from_mappings(module, [returned], who)
    elif _is_list(returned) and len(returned) == 2 and all(_is_list(part) for part in returned):
        optimizers, schedulers = list(returned[0]), list(returned[1])
    elif _is_list(returned) and returned and all(isinstance(o, Mapping) for o in returned):
        optimizers, schedulers = _from_mappings(module, returned, who)
    elif _is_list(returned) and returned:
        optimizers = list(returned)
    else:
        raise UserCodeError(f"{who} returned {returned!r}; {_EXPECTED}")
    strangers = [o for o in optimizers if not isinstance(o, Optimizer)]
    if strangers or not optimizers:
        raise UserCodeError(f"{who} returned {returned!r}; {_EXPECTED}")
    if module.automatic_optimization and len(optimizers) > 1:
        raise UserCodeError(
            f"{who} returned {len(optimizers)} optimizers; automatic optimization takes one: set "
            "automatic_optimization = False and step them in training_step"
        )
    configs = [_scheduler_config(module, s, who) for s in schedulers]
    for config in configs:
        _check_optimizer(config.scheduler, optimizers, who)
    return optimizers, configs


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step computes the loss itself, like LBFGS.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(2))]
        >>> needs_closure(torch.optim.LBFGS(weights)), needs_closure(torch.optim.SGD(weights))
        (True, False)
    """
    parameters = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def check_closure(
    optimizer: Optimizer, strategy: Strategy, plan: RunPlan, options: StepOptions
) -> None:
    """Check that an optimizer that needs a closure can be stepped with one.

    Raises:
        ConfigurationError: if the loss cannot be computed again within the optimizer's step.
    """
    if not needs_closure(optimizer):
        return
    problem = taken_as_a_whole(strategy, plan)
    if problem:
        pass
    elif strategy.precision.scales_loss:
        problem = f"precision={strategy.precision.name!r} scales the loss"
    elif plan.capabilities.sharded_state or plan.capabilities.engine_steps:
        problem = f"the strategy {plan.strategy.name!r} spreads what it computes with over ranks"
    elif options.most_micro_batches > 1:
        problem = "accumulate_grad_batches has several batches in a step, of which none is kept"
    if problem:
        raise ConfigurationError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and {problem}: "
            "take another optimizer, or leave that out"
        )


def clear_nothing() -> None:
    """Take the place of what clears gradients, if they are cleared elsewhere."""


def count_steps(optimizer: Any, state: FitState) -> None:
    """Count the steps of user code, except steps that loss scaling skips.

    Args:
        optimizer: a `LiteOptimizer`.
        state: counts them.
    """
    step, precision = optimizer.step, optimizer.strategy.precision

    def count(closure: Any = None, **arguments: Any) -> Any:
        result = step(closure, **arguments)
        state.global_step += not precision.step_was_skipped
        return result

    optimizer.step = count


def _from_mappings(
    module: Module, items: Sequence[Mapping[str, Any]], who: str
) -> tuple[list[Any], list[Any]]:
    for item in items:
        if unknown := set(item) - {"optimizer", "lr_scheduler", "monitor"}:
            module._refuse_options(f"{who} returned a dict with {sorted(unknown)}; {_EXPECTED}")
    optimizers = [item.get("optimizer") for item in items]
    schedulers = []
    for item in items:
        scheduler = item.get("lr_scheduler")
        if scheduler is not None:
            fields = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
            if "monitor" in item:
                fields.setdefault("monitor", item["monitor"])
            schedulers.append(fields)
    return optimizers, schedulers


def _check_optimizer(scheduler: Any, optimizers: Sequence[Optimizer], who: str) -> None:
    """Raise if the optimizer of a scheduler is not among the returned optimizers."""
    own = getattr(scheduler, "optimizer", None)
    if isinstance(own, Optimizer) and all(own is not one for one in optimizers):
        raise UserCodeError(
            f"{who} returned a {type(scheduler).__name__} of a {type(own).__name__} that it did "
            "not return, so that it would change no learning rate that is trained with: make it "
            "of the optimizer that is returned"
        )


def _scheduler_config(module: Module, returned: Any, who: str) -> SchedulerConfig:
    automatic = module.automatic_optimization
    fields = dict(returned) if isinstance(returned, Mapping) else {"scheduler": returned}
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    if unknown := fields.keys() - known:
        module._refuse_options(
            f"{who} returned a scheduler with {sorted(unknown)}; expected 'scheduler', 'interval', "
            "'frequency', 'monitor', 'strict', 'name' and 'reduce_on_plateau'"
        )
        fields = {name: value for name, value in fields.items() if name in known}
    if "scheduler" not in fields:
        raise UserCodeError(f"{who} returned a scheduler's options without 'scheduler'")
    if fields.get("reduce_on_plateau") is None:
        fields["reduce_on_plateau"] = isinstance(fields["scheduler"], ReduceLROnPlateau)
    config = SchedulerConfig(**fields)
    # In manual optimization user code calls the method of a scheduler that has no step().
    if automatic and not hasattr(config.scheduler, "step"):
        raise UserCodeError(
            f"{who} returned {config.scheduler!r} in the place of a scheduler: expected an object "
            "with step(), or automatic_optimization = False, where training_step calls it"
        )
    if config.interval not in ("epoch", "step") or config.frequency < 1:
        raise UserCodeError(
            f"{who} returned a scheduler with interval={config.interval!r}, frequency="
            f"{config.frequency!r}; expected 'epoch' or 'step', and at least 1"
        )
    if not config.reduce_on_plateau:
        # A monitor beside a scheduler that is not stepped with a value says nothing about it.
        config.monitor = None
        return config
    if not automatic:
        return config
    kind = type(config.scheduler).__name__
    if config.monitor is None:
        raise UserCodeError(
            f"{who} returned a {kind} without 'monitor': name the logged value that it is stepped "
            "with, as in {'scheduler': ..., 'monitor': 'val_loss'}"
        )
    return config


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
