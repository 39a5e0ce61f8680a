"""ModuleUpdate: the parts of a step that the Module or the optimizer performs itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import PluginError, UserCodeError
from stratagem.interfaces.stepping import TrainStep
from stratagem.trainer.hooks import Hook, is_users
from stratagem.trainer.step.optimizers import clear_nothing, needs_closure

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.context import StepContext
    from stratagem.trainer.step.step import Step


class ModuleUpdate(TrainStep):
    """Lets the Module step the optimizer, in the order that `StepHooks` describes.

    It takes the place of `Strategy.train_step`. The strategy gets this object instead of the `Step`
    for forward and backward of each micro-batch.

    Args:
        step: the step of the fit.
        context: the objects of the fit.
    """

    def __init__(self, step: Step, context: StepContext) -> None:
        strategy, module, prepared = context.strategy, context.module, context.prepared
        self._step = step
        self._module = module
        self._strategy = strategy
        self._prepared = prepared
        self._inner = prepared.optimizers[0]
        self._optimizer = context.optimizers[0]
        self._optimizer.step = self._update
        # One that is not torch's may want its closure too: its signature does not say.
        foreign = not type(self._inner).__module__.startswith("torch.")
        can = strategy.capabilities
        self._hands_closure_over = (needs_closure(self._inner) or foreign) and not (
            strategy.precision.scales_loss or can.engine_clips or can.engine_steps
        )
        self.clip = clip = step.clip
        self._clip_options = (None, None) if clip is None else (clip.value, clip.algorithm)
        self._clips_itself = is_users(module, "configure_gradient_clipping")
        if self._clips_itself:
            self.clip = None
        self._has_own_backward = is_users(module, "backward")
        self._ran_backward = False
        if self._has_own_backward:
            prepared.run_backward = self._backward
        # Called before the first backward of a step, not after the update.
        self._before_clearing = step.take_clearing_hooks()
        # The function of an engine does not clear; it raises if gradients await a step.
        self._check_updated = prepared.clear_gradients[0] if can.engine_steps else clear_nothing
        prepared.clear_gradients[0] = clear_nothing
        self._before_update: tuple[Hook, ...] = ()
        self._after_update: tuple[Hook, ...] = ()
        self._last: tuple[Any] | None = None
        """The micro-batch that the closure computes with."""
        self._has_cleared = self._was_taken = self._was_left_out = False
        self._evaluations = 0
        """Calls of the closure in this step."""

    def surround(self, before: Hook, after: Hook) -> None:
        """Call `before` and `after` around the optimizer's step."""
        self._before_update = (*self._before_update, before)
        self._after_update = (after, *self._after_update)

    def run(self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]) -> None:
        """Take the place of `Strategy.train_step`."""
        strategy, count, position = self._strategy, len(micro_batches), 0
        self._has_cleared = self._was_taken = self._was_left_out = False
        self._evaluations = 0
        # The tuple of enumerate() would keep a batch in memory while the next batch is read.
        for micro_batch in micro_batches:
            position += 1  # noqa: SIM113
            if position == count:
                self._take_last(micro_batch)
            else:
                with strategy.no_sync(prepared) or nullcontext():
                    strategy.accumulate(prepared, self, micro_batch, count)
            self._step.end(micro_batch)
            del micro_batch

    def _take_last(self, micro_batch: Any) -> None:
        """Let the Module step the optimizer, around the last micro-batch's forward and backward."""
        module, step = self._module, self._step
        step.begin(micro_batch)
        self._last = (micro_batch,)
        counts = step.metrics.counts
        try:
            module.optimizer_step(step.state.epoch, step.batch_idx, self._optimizer, self._closure)
        finally:
            self._last = None
            step.metrics.counts = counts
        if not self._evaluations:
            raise UserCodeError(
                f"{type(module).__name__}.optimizer_step did not call its closure, which computes "
                "the loss: call optimizer.step(closure=optimizer_closure), or optimizer_closure() "
                "itself"
            )
        if not step.has_loss:
            return
        self._check_updated()
        if self._was_left_out and not self._was_taken:
            step.optimizer_step_was_skipped(self._inner)
        else:
            step.after_optimizer_step(self._inner)

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
            if self._step.expected > 1:
                raise UserCodeError(
                    f"{type(self._module).__name__}.optimizer_step computes the loss again, and "
                    f"{self._step.expected} batches are accumulated, of which only the last one is "
                    "there: leave out accumulate_grad_batches, or call the closure once"
                )
            self._has_cleared = False
            self._step.metrics.counts &= self._step.policy.counts_each_loss
        with torch.enable_grad():
            self._strategy.accumulate(self._prepared, self, self._last[0], self._step.expected)
        if self._has_own_backward and self._step.has_loss and not self._ran_backward:
            raise PluginError(
                f"{type(self._strategy).__name__}.backward has run without a call of "
                f"{type(self._module).__name__}.backward: expected it to call super().backward(...)"
                ", or prepared.run_backward(loss), as Strategy.backward does"
            )
        loss = None if self._step.latest_loss is None else self._step.latest_loss.detach()
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
        if self._step.has_loss:
            self._strategy.finish_step(self._prepared, self)
        return result

    def _then_clip(self, closure: Callable[[], Any]) -> Any:
        """Compute loss and gradients; then what comes before an update."""
        result = closure()
        if self._step.has_loss:
            self._handle_gradients(self._inner)
            if self.clip is not None:
                self._strategy.clip_gradients(self._prepared, self._inner, self.clip)
        return result

    def _handle_gradients(self, optimizer: Optimizer) -> None:
        """Call the hooks; then clip, if the Module does that."""
        self._step.before_optimizer_step(optimizer)
        if self._clips_itself:
            self._module.configure_gradient_clipping(optimizer, *self._clip_options)

    # -- called by the strategy

    def begin(self, micro_batch: Any) -> Any:
        """See `Step`; the last micro-batch has begun before `optimizer_step`."""
        step = self._step
        return step.begin(micro_batch) if self._last is None else step.batch

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """See `Step`."""
        return self._step.loss(part, converted=converted)

    def before_backward(self, loss: Tensor) -> None:
        """Clear the gradients before the first backward of a step, and call the hooks."""
        if not self._has_cleared:
            self._has_cleared = True
            for hook in self._before_clearing:
                hook(self._inner)
            epoch, batch_idx = self._step.state.epoch, self._step.batch_idx
            self._module.optimizer_zero_grad(epoch, batch_idx, self._optimizer)
        self._step.before_backward(loss)

    def after_backward(self) -> None:
        """See `Step`."""
        self._step.after_backward()

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
