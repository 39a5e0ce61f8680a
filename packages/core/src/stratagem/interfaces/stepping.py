"""Stepping: the part of a Strategy that takes optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import StratagemError, UserCodeError
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.plan.step_options import GradientClip

if TYPE_CHECKING:
    from stratagem.interfaces.micro_batch import MicroBatch


class Stepping:
    """The optimizer step of a strategy; base class of `Strategy`, which documents the calls."""

    precision: Precision

    opens_micro_batches: bool = False
    """Whether a `train_step` or `accumulate_all` of one's own computes the loss of each micro-batch
    separately, by `step.open`. Models with `loss_weight` need it, under such a strategy."""

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Run one optimizer step over its micro-batches.

        Each micro-batch's loss is divided by the number of micro-batches. If all micro-batches were
        skipped (no loss), no step is taken.

        Args:
            prepared: the model.
            step: the front end's work on each micro-batch.
            micro_batches: the micro-batches of the step. They may be read from the loader during
                iteration: their number is known before, iterate once, and keep no micro-batch.
        """
        if self.accumulate_all(prepared, step, micro_batches):
            self.finish_step(prepared, step)

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        """Run forward and backward of all micro-batches; return whether any had a loss.

        Ranks communicate gradients once, in the backward of the last micro-batch.
        """
        count = len(micro_batches)
        has_loss = False
        position = 0
        # No `enumerate`: its tuple would keep a batch while the next one is read.
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
        """Run forward and backward of a micro-batch; return whether it had a loss.

        The loss is divided by `count`, the number of micro-batches. An engine that accumulates by
        itself overrides this method, to pass the undivided loss. An engine that computes the loss
        in parts calls `step.loss` for each part.
        """
        loss = step.loss(step.begin(micro_batch), converted=True)
        if loss is None:
            return False
        step.before_backward(loss)
        self.backward(prepared, loss if count == 1 else loss / count)
        step.after_backward()
        return True

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        """Take the step after the last backward: unscale, hooks, clip, step, count, clear.

        A step that loss scaling skips is not counted.
        """
        optimizer = prepared.optimizers[0]
        # Unscale before user code sees the gradients; clip after user code may have changed them.
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
        """Return a context in which backward does not communicate.

        Return None if backward never communicates.
        """
        return None

    def backward_in_forward(self, prepared: PreparedModel) -> AbstractContextManager[Any]:
        """Return a context for a forward in which user code calls `backward`.

        The Trainer enters the context for each `training_step` of manual optimization.
        """
        return nullcontext()

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        """Return a clearer error for an error of forward or backward, or None.

        Both front ends call this only after a step has failed, so that successful steps have no
        cost.
        """
        return None

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from `loss`, a scalar, with the further arguments of `Tensor.backward`."""
        if self.precision.scales_loss:
            loss = self.precision.scale_loss(loss)
        prepared.run_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        """Clip the gradients of the optimizer's parameters; return their norm, if computed."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clip.algorithm == "value":
            self.clip_grad_value(parameters, clip.value)
            return None
        return self.clip_grad_norm(
            parameters,
            clip.value,
            norm_type=clip.norm_type,
            error_if_nonfinite=clip.error_if_nonfinite,
        )

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Limit each gradient, as `torch.nn.utils.clip_grad_value_`.

        A strategy whose gradients are sharded may override it.
        """
        nn.utils.clip_grad_value_(parameters, clip_value)

    def clip_grad_norm(
        self, parameters: Sequence[Tensor], max_norm: float, **options: Any
    ) -> Tensor:
        """Limit the norm of all gradients, as `torch.nn.utils.clip_grad_norm_`; return the norm.

        A strategy whose gradients are sharded overrides it: the norm is that over all ranks.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, **options)

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step an optimizer; return the value that its `step` returns.

        Args:
            prepared: the optimizer's model.
            optimizer: an optimizer of the model.
            closure: computes the loss and the gradients again, for optimizers such as LBFGS. Only
                hand-written loops pass one.

        Raises:
            UserCodeError: a closure was passed, and the precision scales the loss.
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
    """The front end's part of an optimizer step; the strategy calls its methods.

    For each micro-batch, in this order:
        1. `begin(micro_batch)`, once: converts the micro-batch, and calls the hooks at its start.
        2. `loss(batch, converted=True)` with the batch that `begin` returned. A strategy may call
           it several times, with parts of the batch. Where the loss does not count (on the first
           stages of a pipeline), it calls `loss` in the context `without_logging`.
        3. `before_backward(loss)` and `after_backward()`, around each backward.
        4. `end(micro_batch)`, once.

    Then once, after the last backward: `before_optimizer_step`, with gradients unscaled and not yet
    clipped, and `after_optimizer_step`, with gradients not yet cleared. If loss scaling skips the
    step, `optimizer_step_was_skipped` is called instead of `after_optimizer_step`.
    `Strategy.accumulate_all` does the first part, `Strategy.finish_step` the second.

    A strategy that works on several micro-batches at the same time, such as a pipeline, calls
    `open(micro_batch)` instead of `begin`, and then the methods of the `MicroBatch`. These call
    `suspend` and `resume` if the last call was for another micro-batch.

    A strategy that runs the whole step as one program calls `begin` and `end` for each micro-batch
    and `after_optimizer_step`. It omits the hooks that the program cannot call.

    Attributes:
        clip: the gradient clipping; None for no clipping.
        current: the opened micro-batch that the methods work on; None: that of the last `begin`.

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
    current: MicroBatch | None = None

    def open(self, micro_batch: Any) -> MicroBatch:
        """Begin a micro-batch while others are under way; return the object to work on it."""
        from stratagem.interfaces.micro_batch import MicroBatch  # most strategies open none

        return MicroBatch(self, micro_batch)

    def suspend(self) -> Any:
        """Return the state of the current micro-batch, which `resume` restores; never None.

        A front end that keeps something of each micro-batch overrides both methods.
        """
        return ()

    def resume(self, suspended: Any) -> None:
        """Restore the state of an opened micro-batch; None: it is about to begin."""

    def without_logging(self) -> AbstractContextManager[Any]:
        """Return a context in which values that user code logs are dropped.

        For a `loss` that does not count: on a rank that does not compute the loss, or in a run on
        tensors without values.
        """
        return nullcontext()

    def begin(self, micro_batch: Any) -> Any:
        """Return the micro-batch on the device, converted; call the hooks at its start."""
        return micro_batch

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """Return the loss of a micro-batch or a part; call user code, but no hooks.

        It can be called again, for parts of a micro-batch or to learn shapes. Values that user code
        logs count only between `begin` and `end`.

        Args:
            part: a micro-batch, or some of its samples.
            converted: whether `part` comes from the return value of `begin`.

        Returns:
            A scalar with a gradient; None skips the micro-batch.
        """
        raise NotImplementedError

    def end(self, micro_batch: Any) -> None:
        """Called after all work on a micro-batch, except the optimizer step."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss before its backward."""

    def after_backward(self) -> None:
        """Called after each backward."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after all gradients are computed, before clipping."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared; counts the step."""

    def optimizer_step_was_skipped(self, optimizer: Optimizer) -> None:
        """Called instead of `after_optimizer_step` if loss scaling skipped the step."""
