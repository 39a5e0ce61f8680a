"""Stepping: the part of a Strategy that takes optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import StratagemError, UserCodeError
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.plan.step_options import GradientClip


class Stepping:
    """How a strategy takes an optimizer step; `Strategy` is one, and says when each is called."""

    precision: Precision

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Run one optimizer step over its micro-batches.

        The loss of each micro-batch counts equally: it is divided by their number. A step whose
        micro-batches were all skipped (no loss) is not taken.

        Args:
            prepared: the model.
            step: what the front end does for each of them.
            micro_batches: may be read from the loader as this goes through them: their number is
                known before, they come once, and none is kept.
        """
        if self.accumulate_all(prepared, step, micro_batches):
            self.finish_step(prepared, step)

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        """Run forward and backward of all micro-batches; return whether any had a loss.

        Gradients are communicated once, in the last micro-batch's backward.
        """
        count = len(micro_batches)
        has_loss = False
        position = 0
        # No `enumerate`, whose tuple would keep a batch while the next one is read.
        for micro_batch in micro_batches:
            position += 1  # noqa: SIM113
            held = None if position == count else self.no_sync(prepared)
            if held is None:
                has_loss |= self.accumulate(prepared, step, micro_batch, count)
            else:
                with held:
                    has_loss |= self.accumulate(prepared, step, micro_batch, count)
            step.end(micro_batch)
            del micro_batch
        return has_loss

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        """Run forward and backward of one of `count` micro-batches; return whether it had a loss.

        An engine that owns accumulation overrides this, to hand over the loss undivided; one that
        computes the loss in parts calls `step.loss` for each.
        """
        loss = step.loss(step.begin(micro_batch), converted=True)
        if loss is None:
            return False
        step.before_backward(loss)
        self.backward(prepared, loss if count == 1 else loss / count)
        step.after_backward()
        return True

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        """Take the step once gradients are there: unscale, hooks, clip, step, count, clear.

        One that loss scaling leaves out is not counted.
        """
        optimizer = prepared.optimizers[0]
        # Unscaled before anyone sees the gradients; clipped after user code may change them.
        if self.precision.scales_loss:
            self.precision.unscale_gradients(optimizer)
        step.before_optimizer_step(optimizer)
        clip = step.clip
        if clip is not None:
            self.clip_gradients(prepared, optimizer, clip)
        self.optimizer_step(prepared, optimizer)
        if self.precision.step_was_skipped:
            step.optimizer_step_was_skipped(optimizer)
        else:
            step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()

    def no_sync(self, prepared: PreparedModel) -> AbstractContextManager[Any] | None:
        """Return a context in which backward communicates nothing, or None: nothing to hold."""
        return None

    def backward_in_forward(self, prepared: PreparedModel) -> AbstractContextManager[Any]:
        """Return a context for one forward in which user code calls `backward` itself.

        The Trainer enters it for each `training_step` of manual optimization.
        """
        return nullcontext()

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        """Return a better error for one that came out of forward or backward, or None.

        Called by both front ends after a step has failed, so that a good one does not pay for it.
        """
        return None

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from `loss`, a scalar; further arguments are those of `Tensor.backward`."""
        if self.precision.scales_loss:
            loss = self.precision.scale_loss(loss)
        prepared.run_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        """Clip the gradients of the optimizer's parameters; return their norm if there is one."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clip.algorithm == "value":
            nn.utils.clip_grad_value_(parameters, clip.value)
            return None
        return nn.utils.clip_grad_norm_(
            parameters,
            clip.value,
            norm_type=clip.norm_type,
            error_if_nonfinite=clip.error_if_nonfinite,
        )

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step one optimizer; return what its `step` does.

        Args:
            prepared: the model that it is of.
            optimizer: one of its optimizers.
            closure: computes the loss and the gradients again, for optimizers such as LBFGS; only
                a hand-written loop has one.

        Raises:
            UserCodeError: a closure, under a precision that scales the loss.
        """
        if not self.precision.scales_loss:
            return optimizer.step() if closure is None else optimizer.step(closure)
        if closure is not None:
            raise UserCodeError(
                f"precision={self.precision.name!r} scales the loss, and a step with a closure "
                "computes a loss of its own: step without a closure, or pass precision='bf16-mixed'"
            )
        self.precision.optimizer_step(optimizer)
        return None


class TrainStep:
    """What one optimizer step consists of; the strategy decides when each piece happens.

    For each micro-batch, in this order:
        1. `begin(micro_batch)`, once: converts it, and calls the hooks of its start.
        2. `loss(batch, converted=True)` of what `begin` returned; or several times, of parts of it,
           or not at all on a rank that has no loss to compute (a stage of a pipeline).
        3. `before_backward(loss)` and `after_backward()`, around each backward.
        4. `end(micro_batch)`, once.

    Then once, after the last backward: `before_optimizer_step`, with gradients unscaled and not yet
    clipped, and `after_optimizer_step`, with gradients not yet cleared (or, where loss scaling left
    the step out, `optimizer_step_was_skipped`). `Strategy.accumulate_all`
    does the first part, `Strategy.finish_step` the second.

    A strategy that runs the whole step as one program calls `begin` and `end` of each micro-batch,
    `after_optimizer_step`, and leaves out the hooks that it has no place for.

    Attributes:
        clip: how gradients are to be clipped; None: not at all.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.strategies import TrainStep
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> prepared = lite.strategy.prepare(net, [torch.optim.SGD(net.parameters(), lr=0.5)])
        >>> class Square(TrainStep):
        ...     def loss(self, part, *, converted=False):
        ...         return prepared.module(part).square().mean()
        >>> for _ in range(20):
        ...     lite.strategy.train_step(prepared, Square(), [torch.ones(4, 1)])
        >>> abs(net.weight.item()) < 1e-4
        True
    """

    clip: GradientClip | None = None

    def begin(self, micro_batch: Any) -> Any:
        """Return the micro-batch on the device, converted, after the hooks of its start."""
        return micro_batch

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """Return the loss of a micro-batch or of a part of it; calls user code and no hooks.

        It can be called again, for parts of a micro-batch or to learn shapes. What user code logs
        counts between `begin` and `end` only.

        Args:
            part: a micro-batch, or some of its samples.
            converted: whether it comes from what `begin` returned.

        Returns:
            A scalar with a gradient; None skips the micro-batch.
        """
        raise NotImplementedError

    def end(self, micro_batch: Any) -> None:
        """Called when all work on a micro-batch is done, but for the optimizer step."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss before its backward."""

    def after_backward(self) -> None:
        """Called after each backward."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when all gradients are there, before they are clipped."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared; counts the step."""

    def optimizer_step_was_skipped(self, optimizer: Optimizer) -> None:
        """Called in the place of `after_optimizer_step` where loss scaling left the step out."""
