"""Step: one optimizer step of a Module, with its micro-batches and hooks; and `make_step`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import NonFiniteLossError, StratagemError, UserCodeError, with_explanation
from stratagem.interfaces.contract_checks import context_of
from stratagem.interfaces.prepared_model import PreparedModel, StepModule
from stratagem.interfaces.stepping import TrainStep
from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.runtime.loss_factors import weighted
from stratagem.trainer.hooks import Hook, positional_parameters
from stratagem.trainer.step.batches import batch_converter, refuse_dataloader_iter
from stratagem.trainer.step.contract_check import StrategyCheck, step_hooks_of, takes_own_steps
from stratagem.trainer.step.optimizers import clear_nothing, needs_closure

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.plan.step_options import GradientClip
    from stratagem.trainer.context import StepContext
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.step.update import ModuleUpdate


StepType = TypeVar("StepType", bound="Step")


class EndOfEpoch(Exception):  # no error: user code asks for it
    """Ends the epoch before the current batch, as -1 from `on_train_batch_start` does.

    Attributes:
        data_has_ended: the epoch ends since the loader has no further batch, so validation follows.
    """

    data_has_ended = False


class Step(TrainStep):
    """One optimizer step of a Module, with its micro-batches and hooks.

    The loop calls `start`, then `Strategy.train_step`, which calls the methods of `TrainStep`, then
    `finish`, which checks that the strategy has made the required calls.

    Args:
        context: the objects of a fit.

    Attributes:
        update: replaces `Strategy.train_step` if the Module or the optimizer performs a part of the
            step itself. None: the strategy runs the step.
        context: the objects of the fit.
        module, state, metrics, policy: the same objects of `context`.
        batch_idx: the index of the current micro-batch in its epoch.
        batch: the current micro-batch, converted; None between steps.
        outputs, latest_loss: the latest result of `training_step`, and the loss in it.
        expected, begun: the numbers of micro-batches of the current step and of begun
            micro-batches.
        uncounted: the micro-batches that do not count as trained yet; 0 between steps.
        convert: converts a batch of the loader to a batch of the step; None: no conversion.
        on_batch_start, on_batch_end: the hooks of a batch.
    """

    update: ModuleUpdate | None = None

    def __init__(self, context: StepContext) -> None:
        module, strategy, hooks = context.module, context.strategy, context.hooks
        prepared, options = context.prepared, context.trainer.options
        self.batch_idx = 0
        self._clip = options.step_options.clip
        self.uncounted = self.expected = 0
        self.begun = self._ended = 0
        self._factors: Sequence[float | Tensor] | None = None
        self._factor: float | Tensor = 1.0
        self.batch: Any = None
        self.latest_loss: Tensor | None = None
        self._clear_after_step: Callable[[], None] | None = None
        """Clears the gradients once the hooks at the end of a step were called."""
        self._clear_before_backward: Callable[[], None] | None = None
        """Clears the gradients before the first backward of the next step, by the policy."""
        self._clearing_is_due = False
        self.policy = context.policy
        self.context = context
        self.module = module
        self.state = context.state
        self.metrics = context.metrics
        self._schedulers = context.schedulers
        called = _training_step(module, prepared)
        self._training_step = context.profiling.of_strategy("training_step", called)
        convert = batch_converter(strategy, module, context.datamodule)
        if convert is not None:
            convert = context.profiling.of_strategy("batch_to_device", convert)
        self.convert = convert
        self._forward_context: AbstractContextManager[Any] | None = (
            strategy.precision.forward_context()
        )
        self._takes_index = positional_parameters(module.training_step).most > 1
        self._detect = options.detect_anomaly
        self._stepped = False
        self._has_loss: bool | None = None
        """Whether a micro-batch of this step has a loss; None: none was computed yet."""
        self._left_out = False
        """Whether loss scaling skipped this step."""
        self.outputs: Any = None
        self._check = StrategyCheck(strategy, prepared, self._clip)
        self._is_watched = self._check.is_due and module.automatic_optimization
        if not module.automatic_optimization:
            context_of(strategy.backward_in_forward, prepared)  # once, not in each step
        self.on_batch_start = hooks.of("on_train_batch_start")
        self.on_batch_end = hooks.of("on_train_batch_end")
        self._on_before_backward = hooks.of("on_before_backward")
        self._divides_loss = context.policy.divides_loss_in_hooks and bool(self._on_before_backward)
        self._on_after_backward = hooks.of("on_after_backward")
        self._on_before_optimizer_step = hooks.of("on_before_optimizer_step")
        self._on_before_zero_grad = hooks.of("on_before_zero_grad")

    @property
    def clip(self) -> GradientClip | None:  # type: ignore[override]
        """How gradients are clipped; None: they are not, or the Module clips them."""
        self._check.clip_was_read = True
        return self._clip

    def surround_backward(self, before: Hook, after: Hook) -> None:
        """Call `before` directly before each backward pass, and `after` directly after it."""
        self._on_before_backward = (*self._on_before_backward, before)
        self._on_after_backward = (after, *self._on_after_backward)

    def surround_update(self, before: Hook, after: Hook) -> None:
        """Call `before` and `after` around the optimizer's step."""
        if self.update is not None:
            self.update.surround(before, after)
            return
        self._on_before_optimizer_step = (*self._on_before_optimizer_step, before)
        self._on_before_zero_grad = (after, *self._on_before_zero_grad)

    def take_clearing_hooks(self) -> tuple[Hook, ...]:
        """Return the hooks before gradients are cleared, which the caller calls from now on."""
        hooks, self._on_before_zero_grad = self._on_before_zero_grad, ()
        return hooks

    def take_over_clearing(self, prepared: PreparedModel) -> None:
        """Keep a step's gradients until `on_train_batch_end` was called, which may read them."""
        clear, prepared.clear_gradients[0] = prepared.clear_gradients[0], clear_nothing
        if not self.policy.clears_before_backward:
            self._clear_after_step = clear
            return
        hooks = self.take_clearing_hooks()

        def call_and_clear() -> None:
            for hook in hooks:
                hook(prepared.optimizers[0])
            clear()

        self._clear_before_backward = call_and_clear

    def clear_before_backward(self) -> None:
        """Clear the gradients of the last step, if its policy has left that to this backward."""
        if self._clearing_is_due and self._clear_before_backward is not None:
            self._clearing_is_due = False
            self._clear_before_backward()

    # -- called by the loop

    def micro_batches(self, loader: TrainLoader, accumulate: int) -> Iterator[Collection[Any]]:
        """Return the micro-batches of each step of the epoch."""
        return loader.steps(accumulate)

    def start(self, micro_batches: int, factors: Sequence[float | Tensor] | None = None) -> None:
        """Begin a step with this number of batches and factors of their losses; None: 1 each."""
        self.batch_idx = self.state.batches
        self.uncounted = self.expected = micro_batches
        self.begun = self._ended = 0
        self._factors = factors
        self._clearing_is_due = True
        if self.policy.divides_by_window:
            share = micro_batches / self.context.limits.accumulation(self.state.epoch)
            if share < 1:
                self._factors = [share * one for one in factors or [1.0] * micro_batches]
        self._stepped, self._left_out, self._has_loss = False, False, None
        self.metrics.counts = True

    @property
    def is_under_way(self) -> bool:
        """Whether the step has begun and its batches are not yet counted as trained."""
        return self.begun > 0 and self.uncounted > 0

    @property
    def last_batch_idx(self) -> int:
        """The index of the epoch's current or last batch; -1 before the first batch."""
        return self.batch_idx if self.batch is not None else self.batch_idx - 1

    @property
    def has_loss(self) -> bool:
        """Whether a micro-batch of the last step had a loss."""
        return self._has_loss is True

    def finish(self) -> None:
        """End a step: check it, call the hooks of its last batch, and log its values.

        The batches of a step without any loss count too, although the step was not taken.
        """
        stepped, ended = self._stepped, self._ended
        is_explained = stepped or self._left_out or self._has_loss is False
        if ended != self.expected or self.begun != ended or not is_explained:
            self._check.refuse_incomplete(self.expected, self.begun, ended)
        if not stepped:
            self._count_batches()
        elif self._is_watched:
            self._is_watched = False
            if self.update is None:
                self._check.check()
        self._end_batch()
        # Opened micro-batches may have ended in another order.
        self.batch_idx = max(self.batch_idx, self.state.batches)
        if self._clear_after_step is not None:
            self._clear_after_step()
        self.batch = None
        if stepped and self.metrics.row:
            self.metrics.end_step(self.state.global_step - 1, self.state.epoch)

    def abandon(self) -> None:
        """Drop the current step without taking it, because the epoch ends here."""
        self.uncounted = self.begun = 0
        self.batch = self.metrics.batch = self.outputs = self.latest_loss = self.current = None
        self.metrics.row = {}
        for optimizer in self.context.optimizers:
            optimizer.zero_grad()

    def step_function(self) -> Callable[..., None]:
        """Return the step function: it takes the model, this step and its micro-batches."""
        if self.update is not None:
            return self.update.run
        automatic = self.module.automatic_optimization and self.context.optimizers
        return self.context.strategy.train_step if automatic else self.manual

    def manual(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Take the place of `Strategy.train_step` where user code steps the optimizers, if any."""
        for micro_batch in micro_batches:
            before = self.state.global_step
            with self.context.strategy.backward_in_forward(prepared):
                self.loss(self.begin(micro_batch), converted=True)
            self._stepped = self.state.global_step > before
            self._count_batches()
            self._has_loss = False  # as for `finish`: user code takes its steps
            self.end(micro_batch)

    def _count_batches(self) -> None:
        self.state.batches += self.uncounted
        self.uncounted = 0

    def _end_batch(self) -> None:
        if self.on_batch_end:
            loss = None if self.latest_loss is None else self.latest_loss.detach()
            outputs = self.outputs
            # Detached, so that callbacks do not keep the graph of the loss.
            outputs = {**outputs, "loss": loss} if isinstance(outputs, dict) else {"loss": loss}
            for hook in self.on_batch_end:
                hook(outputs, self.batch, self.batch_idx)
        self.batch_idx += 1

    # -- called by the strategy

    def suspend(self) -> Any:
        """Return the state of the current micro-batch."""
        results = self.outputs, self.latest_loss
        return self.batch, self.batch_idx, *results, self._factor, self.metrics.counts

    def resume(self, suspended: Any) -> None:
        """Restore the state of an opened micro-batch; None: it is about to begin."""
        if suspended is None:
            suspended = None, self.state.batches + self.begun, None, None, 1.0, True
        self.batch, self.batch_idx, self.outputs, self.latest_loss, *weight = suspended
        self._factor, self.metrics.counts = weight
        self.metrics.batch = self.batch

    @contextmanager
    def without_logging(self) -> Iterator[None]:
        """Drop the values that user code logs in this context."""
        self.metrics.drops_values = True
        try:
            yield
        finally:
            self.metrics.drops_values = False

    def begin(self, micro_batch: Any) -> Any:
        """Call the hooks of a micro-batch's start; return the converted batch."""
        if self.begun > self._ended and self._check.is_due and self.current is None:
            self._check.refuse_overlap()
        self.begun += 1
        batch = micro_batch if self.convert is None else self.convert(micro_batch)
        if self._factors is not None:
            self._factor = self._factors[self.begun - 1]
            # The number 0.0: it is repeated to match other ranks' steps, or has no elements.
            self.metrics.counts = self._factor.__class__ is not float or self._factor != 0.0
        self.batch = self.metrics.batch = batch
        for hook in self.on_batch_start:
            returned = hook(batch, self.batch_idx)
            if type(returned) is int and returned == -1:
                raise EndOfEpoch
        return batch

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """Return the loss of a batch, or of a part of a batch."""
        if not converted and self.convert is not None:
            part = self.convert(part)
        if part is not self.batch:
            return self._loss_of_part(part)
        arguments = (part, self.batch_idx) if self._takes_index else (part,)
        if part is None:
            outputs = None  # its collate function has left all samples out
        elif self._forward_context is None:
            outputs = self._training_step(*arguments)
        else:
            with self._forward_context:
                outputs = self._training_step(*arguments)
        self.outputs = outputs
        loss = outputs if outputs.__class__ is Tensor else self._loss_in(outputs)
        self.latest_loss = loss
        if loss is None:
            self._has_loss = bool(self._has_loss)
            return None
        self._has_loss = True
        if self._detect and (self._factors is None or self.metrics.counts):
            self._check_finite(loss)
        return loss if self._factors is None else weighted(loss, self._factor)

    def _loss_of_part(self, part: Any) -> Tensor | None:
        """Return the loss of some samples of a batch; outside of one, nothing logged counts."""
        whole, counted = self.batch, self.metrics.counts
        self.metrics.counts = counted and whole is not None
        self.batch = self.metrics.batch = part
        try:
            return self.loss(part, converted=True)
        finally:
            self.batch = self.metrics.batch = whole
            self.metrics.counts = counted

    def end(self, micro_batch: Any) -> None:
        """Count the micro-batch, and call the hooks of its end.

        For the last batch of a step, `finish` calls them, after the optimizer step.
        """
        self._ended += 1
        if self._ended < self.expected:
            self._end_batch()
            # Free the batch before the next one is read.
            self.batch = self.metrics.batch = self.outputs = self.latest_loss = None

    def before_backward(self, loss: Tensor) -> None:
        """Call the hooks."""
        if self._clear_before_backward is not None:
            self.clear_before_backward()
        if self._divides_loss and self.expected > 1:
            loss = loss / self.expected
        for hook in self._on_before_backward:
            hook(loss)

    def after_backward(self) -> None:
        """Call the hooks."""
        for hook in self._on_after_backward:
            hook()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks."""
        for hook in self._on_before_optimizer_step:
            hook(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the step, let schedulers step, and call the hooks.

        The batches of a step count as trained only after the step, all together. So a checkpoint
        that is saved between two micro-batches resumes with the first of them.
        """
        if self._stepped:
            self._check.refuse_counted_twice()
        self.state.global_step += 1
        self.state.batches, self.uncounted = self.state.batches + self.uncounted, 0
        self._stepped = True
        if self._schedulers.configs:
            self._schedulers.step("step", self._schedulers.steps())
        for hook in self._on_before_zero_grad:
            hook(optimizer)

    def optimizer_step_was_skipped(self, optimizer: Optimizer) -> None:
        """Count the batches, but no step, and call the hooks."""
        self._count_batches()
        self._left_out = True
        for hook in self._on_before_zero_grad:
            hook(optimizer)

    def _loss_in(self, outputs: Any) -> Tensor | None:
        if not self.module.automatic_optimization:
            return None
        if outputs is None:
            world_size = self.context.strategy.ranks.world_size
            returned = f"{type(self.module).__name__}.training_step returned None"
            remedy = "end the method with `return loss`. To skip a batch, "
            if self.batch is None:
                returned, remedy = "train_dataloader yielded None", ""
            if world_size > 1:
                raise UserCodeError(
                    f"{returned} for batch {self.batch_idx}, which skips it; with {world_size} "
                    f"ranks the others would wait for its gradients: {remedy}return a loss on "
                    "every rank, such as 0.0 times the output for an input of zeros (0.0 times NaN "
                    "is NaN)"
                )
            if self.batch is None:
                rank_zero_warn(f"{returned}: the batch is skipped, without a training_step")
            elif self.state.epoch == self.state.global_step == self.batch_idx == 0:
                rank_zero_warn(
                    f"{returned} for the first batch, which skips it: without a loss the model "
                    "does not train. End the method with `return loss`, or ignore this warning if "
                    "the batch is meant to be skipped"
                )
            return None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            return loss
        raise UserCodeError(
            f"{type(self.module).__name__}.training_step returned {_described(outputs)}; expected "
            "the loss (a scalar tensor), a dict with the key 'loss', or None to skip the batch"
        )

    def _check_finite(self, loss: Tensor) -> None:
        if not bool(loss.detach().isfinite().all()):
            message = (
                f"the loss of batch {self.batch_idx} in epoch {self.state.epoch} (after "
                f"{self.state.global_step} optimizer steps) is {loss.detach().tolist()}; "
                "expected a finite number: look at the batch, the learning rate and divisions by 0"
            )
            raise NonFiniteLossError(with_explanation(message, "nan"))

    def explain(self, error: RuntimeError) -> UserCodeError | None:
        """Return a clearer error for an exception of a step, or None.

        The loss is checked only here, after the backward pass has failed, so that correct steps
        take no extra time.
        """
        loss = self.latest_loss
        if loss is None or isinstance(error, StratagemError):
            return None
        who = f"{type(self.module).__name__}.training_step"
        if loss.numel() != 1:
            return UserCodeError(
                f"{who} returned a loss of shape {tuple(loss.shape)}; expected a scalar: reduce "
                "it, for example by .mean()"
            )
        if not loss.requires_grad:
            return UserCodeError(
                f"{who} returned a loss without a gradient; expected one that depends on the "
                "parameters: do not detach it, do not compute it under no_grad, and check that "
                "some parameters require gradients"
            )
        if self.module.automatic_optimization and "backward through the graph a" in str(error):
            return UserCodeError(
                f"{who}: backward has run before through a part of the loss's graph. The Trainer "
                "calls backward: remove loss.backward() from training_step, or set "
                "self.automatic_optimization = False. Detach tensors of earlier batches"
            )
        return None


def _training_step(module: Module, prepared: PreparedModel) -> Callable[..., Any]:
    """Return what calls `training_step` as the strategy runs the model.

    Where nothing wraps the model and nothing is hooked to it, that is the method itself.
    """
    called = prepared.module
    hooked = called._forward_hooks or called._forward_pre_hooks or called._backward_hooks
    if type(called) is StepModule and called.module is module and not hooked:
        return module.training_step
    return partial(called, "training_step")


def _described(outputs: Any) -> str:
    if isinstance(outputs, dict):
        return f"a dict with the keys {sorted(map(str, outputs))}"
    return f"a {type(outputs).__name__}"


def make_step(context: StepContext, kind: type[StepType]) -> StepType:
    """Return the optimizer step of a fit, with an `update` if the Module has step hooks.

    Args:
        context: the objects of the fit.
        kind: the class of the step.

    Raises:
        UserCodeError: `training_step` takes `dataloader_iter`.
    """
    refuse_dataloader_iter(context.module.training_step)
    module, prepared, strategy = context.module, context.prepared, context.strategy
    step = kind(context)
    own = step_hooks_of(module)
    if not module.automatic_optimization:
        if "backward" in own:
            prepared.run_backward = module.backward
    elif context.optimizers and (own or any(map(needs_closure, prepared.optimizers))):
        from stratagem.trainer.step.update import ModuleUpdate  # only models that have step hooks

        step.update = ModuleUpdate(step, context)
        return step
    is_automatic = module.automatic_optimization and context.optimizers
    leaves_clearing = takes_own_steps(type(strategy)) or strategy.capabilities.engine_steps
    if is_automatic and not leaves_clearing:
        step.take_over_clearing(prepared)
    return step
