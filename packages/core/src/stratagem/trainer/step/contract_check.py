"""Checks of who performs a step: the strategy's own `train_step`, and the Module's step hooks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NoReturn

from stratagem.errors import ConfigurationError, PluginError
from stratagem.interfaces.stepping import Stepping
from stratagem.interfaces.strategy import Strategy
from stratagem.trainer.hooks import is_users

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.module.module import Module
    from stratagem.plan.plan import RunPlan
    from stratagem.plan.step_options import GradientClip

_STEPS = ("train_step", "accumulate_all", "finish_step")


def takes_own_steps(kind: type[Strategy]) -> bool:
    """Return whether a strategy's class overrides a part of the step."""
    return any(getattr(kind, name) is not getattr(Strategy, name) for name in _STEPS)


STEP_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")


def step_hooks_of(module: Module) -> list[str]:
    """Return the names of the step hooks that a Module overrides.

    Example:
        >>> from stratagem import Module
        >>> module = Module()
        >>> module.optimizer_zero_grad = lambda epoch, batch_idx, optimizer: None
        >>> step_hooks_of(module)
        ['optimizer_zero_grad']
    """
    return [name for name in STEP_HOOKS if is_users(module, name)]


def check_step_hooks(module: Module, strategy: Strategy, plan: RunPlan) -> None:
    """Check that a Module's overridden step hooks can be called, before training.

    With manual optimization, uncalled hooks are only a warning.

    Raises:
        ConfigurationError: if the strategy runs the step as a whole.
    """
    own = step_hooks_of(module)
    if not module.automatic_optimization:
        uncalled = [name for name in own if name != "backward"]
        if uncalled and strategy.ranks.is_global_zero:
            warnings.warn(
                f"{type(module).__name__} overrides {' and '.join(uncalled)}, which nobody calls "
                "with automatic_optimization = False: training_step does what belongs to a step",
                stacklevel=2,
            )
        own = [name for name in own if name == "backward"]
    problem = taken_as_a_whole(strategy, plan)
    can = plan.capabilities
    if not problem and (can.engine_clips or can.engine_steps):
        engines = {
            "backward": can.engine_steps,
            "optimizer_zero_grad": can.engine_steps,
            "configure_gradient_clipping": can.engine_clips,
        }
        own = [name for name in own if engines.get(name)]
        problem = f"the engine of the strategy {plan.strategy.name!r} does that itself"
    if own and problem:
        raise ConfigurationError(
            f"{type(module).__name__} overrides {' and '.join(own)}, and {problem}, so that it "
            "would not be called: leave out one of the two"
        )


def taken_as_a_whole(strategy: Strategy, plan: RunPlan) -> str:
    """Return why user code cannot perform a part of the step; "": it can."""
    kind = type(strategy)
    if any(getattr(kind, n) is not getattr(Stepping, n) for n in ("train_step", "accumulate_all")):
        return f"the strategy {plan.strategy.name!r} takes each step as a whole"
    return ""


class StrategyCheck:
    """Checks a fit's steps, so that a strategy's errors do not go unnoticed.

    After every step, the numbers of counted steps and ended batches are checked, which `Step`
    records anyway. The other checks run once, after the first step of a strategy with its own
    steps.

    Args:
        strategy: the strategy.
        prepared: the prepared model.
        clip: the Trainer's clipping options.

    Attributes:
        is_due: whether the first step has to be checked.
        clip_was_read: whether the strategy has read the clipping options.
    """

    def __init__(
        self, strategy: Strategy, prepared: PreparedModel, clip: GradientClip | None
    ) -> None:
        self._kind = type(strategy)
        self._owns_clipping = strategy.capabilities.engine_clips
        self._prepared = prepared
        self._clip = clip
        self.clip_was_read = False
        self.is_due = takes_own_steps(self._kind)

    def refuse_incomplete(self, expected: int, begun: int, ended: int) -> NoReturn:
        """Raise an error that names the missing call of a step.

        Raises:
            PluginError: the message names the class and the missing call.
        """
        who = f"{self._kind.__name__}.train_step"
        if ended != expected:
            raise PluginError(
                f"{who} has ended {ended} of {expected} micro-batches; expected a call of "
                "step.end(micro_batch) for each, as Strategy.accumulate_all does"
            )
        if begun != expected:
            raise PluginError(
                f"{who} has begun {begun} of {expected} micro-batches; expected a call of "
                "step.begin(micro_batch) for each, before its loss, as Strategy.accumulate does"
            )
        raise PluginError(
            f"{who} has returned, but the step was not counted, so that training would never reach "
            "max_steps: expected a call of step.after_optimizer_step(optimizer) once, "
            "as Strategy.finish_step does, or a loss of None for every micro-batch"
        )

    def refuse_overlap(self) -> NoReturn:
        """Raise an error because a micro-batch began before the previous one ended.

        Raises:
            PluginError: names the class and how to work on several at once.
        """
        raise PluginError(
            f"{self._kind.__name__}.train_step has begun a micro-batch before it ended the one "
            "before, so that hooks and logged values would be of the wrong one: call "
            "step.end(micro_batch) first. To work on several at once, call "
            "step.open(micro_batch) for each, and the methods of what it returns"
        )

    def refuse_counted_twice(self) -> NoReturn:
        """Raise an error because one step was counted several times.

        Raises:
            PluginError: the message names the class and the expected call.
        """
        raise PluginError(
            f"{self._kind.__name__}.train_step has counted one step twice: expected one call of "
            "step.after_optimizer_step(optimizer) for all its micro-batches, as "
            "Strategy.finish_step does"
        )

    def check(self) -> None:
        """Check the first step that was taken.

        Raises:
            PluginError: gradients are left, or were not clipped.
        """
        who = f"{self._kind.__name__}.train_step"
        if self._clip is not None and not self.clip_was_read and not self._owns_clipping:
            raise PluginError(
                f"{who} has not read step.clip, so that gradient_clip_val={self._clip.value} does "
                "nothing: call self.clip_gradients(prepared, optimizer, step.clip) where it is not "
                "None, as Strategy.finish_step does, or set Capabilities.engine_clips where the "
                "engine clips by self.components.step.clip"
            )
        for optimizer in self._prepared.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and bool(parameter.grad.any()):
                        raise PluginError(
                            f"{who} has left gradients after the step, which the next one would "
                            "add to: call prepared.clear_gradients[0]() after "
                            "step.after_optimizer_step(optimizer), as Strategy.finish_step does"
                        )
