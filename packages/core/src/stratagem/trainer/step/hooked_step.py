"""make_step, and HookedStep: a step with parts that the Module or the optimizer runs itself."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, PluginError, UserCodeError
from stratagem.interfaces.stepping import Stepping, TrainStep
from stratagem.trainer.hooks import Hook, is_users
from stratagem.trainer.step.batches import refuse_dataloader_iter
from stratagem.trainer.step.contract_check import takes_own_steps
from stratagem.trainer.step.step import Step, clear_nothing

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.module import Module
    from stratagem.plan.plan import RunPlan
    from stratagem.plan.step_options import GradientClip, StepOptions
    from stratagem.trainer.run import Run

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
    problem = _taken_as_a_whole(strategy, plan)
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


def check_closure(
    optimizer: Optimizer, strategy: Strategy, plan: RunPlan, options: StepOptions
) -> None:
    """Check that an optimizer that needs a closure can be stepped with one.

    Raises:
        ConfigurationError: if the loss cannot be computed again within the optimizer's step.
    """
    if not needs_closure(optimizer):
        return
    problem = _taken_as_a_whole(strategy, plan)
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


def _taken_as_a_whole(strategy: Strategy, plan: RunPlan) -> str:
    kind = type(strategy)
    if any(getattr(kind, n) is not getattr(Stepping, n) for n in ("train_step", "accumulate_all")):
        return f"the strategy {plan.strategy.name!r} takes each step as a whole"
    return ""


class HookedStep(Step):
    """A step in the order that `StepHooks` describes.

    Args:
        run: of a fit.
        prepared: its model.
    """

    _before_update: tuple[Hook, ...] = ()
    _after_update: tuple[Hook, ...] = ()

    def __init__(self, run: Run, prepared: PreparedModel) -> None:
        super().__init__(run, prepared)
        strategy, module = run.strategy, run.module
        self._strategy = strategy
        self._prepared = prepared
        self._inner = prepared.optimizers[0]
        self._optimizer = run.optimizers[0]
        self._optimizer.step = self._update
        # One that is not torch's may want its closure too: its signature does not say.
        foreign = not type(self._inner).__module__.startswith("torch.")
        can = strategy.capabilities
        self._hands_closure_over = (needs_closure(self._inner) or foreign) and not (
            strategy.precision.scales_loss or can.engine_clips or can.engine_steps
        )
        clip = self.clip
        self._clip_options = (None, None) if clip is None else (clip.value, clip.algorithm)
        self._clips_itself = is_users(module, "configure_gradient_clipping")
        if self._clips_itself:
            self.clip = None
        self._has_own_backward = is_users(module, "backward")
        self._ran_backward = False
        if self._has_own_backward:
            prepared.run_backward = self._backward
        # Called before the first backward of a step, not after the update as in `Step`.
        self._before_clearing = self._on_before_zero_grad
        self._on_before_zero_grad = ()
        # An engine's does not clear, but refuses to drop what awaits its step.
        self._check_updated = prepared.clear_gradients[0] if can.engine_steps else clear_nothing
        prepared.clear_gradients[0] = clear_nothing
        self._is_watched = False
        self._last: tuple[Any] | None = None
        """The micro-batch that the closure computes with."""
        self._has_cleared = self._was_taken = self._was_left_out = False
        self._evaluations = 0
        """Calls of the closure in this step."""

    def surround_update(self, before: Hook, after: Hook) -> None:
        """See `Step`."""
        self._before_update = (*self._before_update, before)
        self._after_update = (after, *self._after_update)

    def step_function(self) -> Callable[..., None]:
        """Return the step function."""
        return self._take

    def _take(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Take the place of `Strategy.train_step`."""
        strategy, count, position = self._strategy, len(micro_batches), 0
        self._has_cleared = self._was_taken = self._was_left_out = False
        self._evaluations = 0
        # No `enumerate`, whose tuple would keep a batch while the next one is read.
        for micro_batch in micro_batches:
            position += 1  # noqa: SIM113
            if position == count:
                self._take_last(micro_batch)
            else:
                with strategy.no_sync(prepared) or nullcontext():
                    strategy.accumulate(prepared, self, micro_batch, count)
            self.end(micro_batch)
            del micro_batch

    def _take_last(self, micro_batch: Any) -> None:
        """Let the Module step the optimizer, around the last micro-batch's forward and backward."""
        module, state = self._module, self._state
        self.begin(micro_batch)
        self._last = (micro_batch,)
        counts = self._logged.counts
        try:
            module.optimizer_step(state.epoch, self.batch_idx, self._optimizer, self._closure)
        finally:
            self._last = None
            self._logged.counts = counts
        if not self._evaluations:
            raise UserCodeError(
                f"{type(module).__name__}.optimizer_step did not call its closure, which computes "
                "the loss: call optimizer.step(closure=optimizer_closure), or optimizer_closure() "
                "itself"
            )
        if not self.has_loss:
            return
        self._check_updated()
        if self._was_left_out and not self._was_taken:
            super().optimizer_step_was_skipped(self._inner)
        else:
            super().after_optimizer_step(self._inner)

    def _closure(self) -> Tensor | None:
        """Run forward and backward of the step's last micro-batch; return the loss."""
        if self._last is None:
            raise UserCodeError(
                "the closure of optimizer_step was called after the step that it belongs to: call "
                "it within optimizer_step"
            )
        self._evaluations += 1
        if self._evaluations > 1:
            self._check_updated()
            if self._expected > 1:
                raise UserCodeError(
                    f"{type(self._module).__name__}.optimizer_step computes the loss again, and "
                    f"{self._expected} batches are accumulated, of which only the last one is "
                    "there: leave out accumulate_grad_batches, or call the closure once"
                )
            self._has_cleared = False
            self._logged.counts &= self._policy.counts_each_loss
        with torch.enable_grad():
            self._strategy.accumulate(self._prepared, self, self._last[0], self._expected)
        if self._has_own_backward and self.has_loss and not self._ran_backward:
            raise PluginError(
                f"{type(self._strategy).__name__}.backward has run without a call of "
                f"{type(self._module).__name__}.backward: expected it to call super().backward(...)"
                ", or prepared.run_backward(loss), as Strategy.backward does"
            )
        loss = None if self._loss is None else self._loss.detach()
        ranks = self._strategy.ranks
        if loss is not None and self._hands_closure_over and ranks.world_size > 1:
            # An optimizer that makes decisions by the loss has to make the same ones on every rank.
            return ranks.all_reduce(loss, "mean")
        return loss

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._ran_backward = True
        self._module.backward(loss, *args, **kwargs)

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the place of the optimizer's `step`, as the Module sees it."""
        if self._hands_closure_over and closure is not None:
            for hook in self._before_update:
                hook(self._inner)
            result = self._strategy.optimizer_step(
                self._prepared, self._inner, lambda: self._then_clip(closure)
            )
            self.after_optimizer_step(self._inner)
            return result
        result = None if closure is None else closure()
        if self.has_loss:
            self._strategy.finish_step(self._prepared, self)
        return result

    def _then_clip(self, closure: Callable[[], Any]) -> Any:
        """Compute loss and gradients; then what comes before an update."""
        result = closure()
        if self.has_loss:
            self._handle_gradients(self._inner)
            if self.clip is not None:
                self._strategy.clip_gradients(self._prepared, self._inner, self.clip)
        return result

    def _handle_gradients(self, optimizer: Optimizer) -> None:
        """Call the hooks; then clip, if the Module does that."""
        super().before_optimizer_step(optimizer)
        if self._clips_itself:
            self._module.configure_gradient_clipping(optimizer, *self._clip_options)

    # -- called by the strategy

    def begin(self, micro_batch: Any) -> Any:
        """See `Step`; the last micro-batch has begun before `optimizer_step`."""
        return super().begin(micro_batch) if self._last is None else self._batch

    def before_backward(self, loss: Tensor) -> None:
        """Clear the gradients before the first backward of a step, and call the hooks."""
        if not self._has_cleared:
            self._has_cleared = True
            for hook in self._before_clearing:
                hook(self._inner)
            epoch, batch_idx = self._state.epoch, self.batch_idx
            self._module.optimizer_zero_grad(epoch, batch_idx, self._optimizer)
        super().before_backward(loss)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks, and let the Module clip."""
        self._handle_gradients(optimizer)
        for hook in self._before_update:
            hook(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note it; the step counts once `optimizer_step` of the Module has returned."""
        self._was_taken = True
        for hook in self._after_update:
            hook(optimizer)

    def optimizer_step_was_skipped(self, optimizer: Optimizer) -> None:
        """Note it."""
        self._was_left_out = True
        for hook in self._after_update:
            hook(optimizer)


class _WatchedStep(Step):
    """A step under a strategy that takes its steps itself: notes whether it reads how to clip."""

    @property
    def clip(self) -> GradientClip | None:
        """How gradients are to be clipped."""
        self._check.clip_was_read = True
        return self._clip

    @clip.setter
    def clip(self, value: GradientClip | None) -> None:
        self._clip = value


def make_step(run: Run, prepared: PreparedModel) -> Step:
    """Return the optimizer step of a fit, in the simplest class with the needed features.

    Raises:
        UserCodeError: `training_step` takes `dataloader_iter`.
    """
    refuse_dataloader_iter(run.module.training_step)
    own = step_hooks_of(run.module)
    if not run.module.automatic_optimization:
        if "backward" in own:
            prepared.run_backward = run.module.backward
    elif run.optimizers and (own or any(map(needs_closure, prepared.optimizers))):
        return HookedStep(run, prepared)
    if takes_own_steps(type(run.strategy)):
        return _WatchedStep(run, prepared)
    step = Step(run, prepared)
    is_automatic = run.module.automatic_optimization and run.optimizers
    if is_automatic and not run.strategy.capabilities.engine_steps:
        step.keep_gradients(prepared)
    return step
