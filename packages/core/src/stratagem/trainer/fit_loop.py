"""The training loop, from the first epoch to the last; it reads top to bottom."""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import NonFiniteLossError, StratagemError, UserCodeError
from stratagem.interfaces.train_step import TrainStep

if TYPE_CHECKING:
    from stratagem.distributed.uneven_inputs import UnevenInputs
    from stratagem.interfaces.strategy import PreparedModel
    from stratagem.trainer.loaders import LimitedLoader
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.resume.rank_state import RankState
    from stratagem.trainer.run import Run


def fit(
    run: Run,
    prepared: PreparedModel,
    loader: LimitedLoader,
    rank_state: RankState,
    uneven_inputs: UnevenInputs | None = None,
) -> None:
    """Train until a limit is reached or `Trainer.should_stop` is set.

    Args:
        run: this one.
        prepared: the model.
        loader: this rank's training batches.
        rank_state: where in them this rank begins.
        uneven_inputs: what ranks ask before each step, where their numbers of batches may differ.
    """
    trainer, module, progress, hooks = run.trainer, run.module, run.progress, run.hooks
    step = run.step = Step(run, prepared)
    one_step = run.strategy.train_step if module.automatic_optimization else step.manual
    look = run.look()
    check = run.divergence_check(prepared)
    steps_schedulers = module.automatic_optimization
    ranks = run.strategy.data_shard[1]

    # Submodules of a model in training mode keep theirs: they may be frozen.
    if not module.training:
        module.train()
    hooks.call("on_train_start")
    rank_state.begin_training()
    try:
        # No batch at all was asked for with limit_train_batches=0.
        while loader.batches > 0 and not _is_finished(run):
            epoch = progress.epoch
            run.set_epoch(loader)
            accumulate = trainer.accumulation(epoch)
            validates = run.validates_in(epoch)
            validate_every = run.validate_every(loader.batches) if validates else math.inf
            hooks.call("on_train_epoch_start")
            run.train_values.in_step = True

            batches, passed_over, most = rank_state.begin_epoch(
                epoch, progress.batches, loader.batches
            )
            if uneven_inputs is not None:
                uneven_inputs.remember(passed_over)
            left = min(loader.batches - progress.batches, most)
            # Resumed from a checkpoint that was saved before the validation of its step.
            validation_is_due = (
                progress.batches > progress.validated
                and progress.batches % validate_every < accumulate
            )
            if validation_is_due and left > 0:
                run.validate_during_fit(prepared)
                validation_is_due = False
            while left > 0:
                wanted = int(min(accumulate, left))
                micro_batches = list(islice(batches, wanted))
                weights = None
                if uneven_inputs is not None:
                    micro_batches, weights = uneven_inputs.next_step(
                        micro_batches, progress.batches
                    )
                elif len(micro_batches) < wanted and ranks > 1:
                    raise UserCodeError(_broken_promise(loader, progress, len(micro_batches)))
                if not micro_batches:
                    if progress.batches == 0:
                        raise UserCodeError(
                            f"{loader.name} yielded no batch; expected at least one"
                        )
                    break
                step.begin(len(micro_batches), weights)
                one_step(prepared, step, micro_batches)
                step.end()
                if run.saves_due:
                    run.save_due()
                left -= len(micro_batches)

                validation_is_due = progress.batches % validate_every < len(micro_batches)
                if validation_is_due and left > 0:
                    run.validate_during_fit(prepared)
                    validation_is_due = False
                if check is not None:
                    check.look(progress.global_step, step.loss is not None)
                if look():
                    if run.interruption.signal is not None:
                        run.interruption.end(run.save_interrupted)
                    trainer.should_stop = True
                if trainer.should_stop and run.should_stop():
                    break
                if progress.global_step == trainer.max_steps:
                    break
            # What follows sees the epoch as finished, so that a checkpoint saved from here on
            # resumes with the next one. A stop in the middle leaves it unfinished.
            progress.epoch_is_done = left <= 0 or not micro_batches
            if progress.epoch_is_done:
                if steps_schedulers:
                    run.step_schedulers("epoch", epoch + 1)
                if validates and (validation_is_due or validate_every == math.inf):
                    run.validate_during_fit(prepared)
            run.end_train_epoch()
            if not progress.epoch_is_done:
                break
            progress.next_epoch()
    except RuntimeError as error:
        explained = step.explain(error) or run.strategy.explain(prepared, error)
        if explained is None:
            raise
        raise explained from error
    hooks.call("on_train_end")


def _is_finished(run: Run) -> bool:
    trainer, progress = run.trainer, run.progress
    if trainer.max_steps != -1 and progress.global_step >= trainer.max_steps:
        return True
    if trainer.max_epochs != -1 and progress.epoch >= trainer.max_epochs:
        return True
    return run.should_stop()


def _broken_promise(loader: LimitedLoader, progress: Progress, more: int) -> str:
    return (
        f"{loader.name} yielded {progress.batches + more} batches on this rank, but its length "
        f"promised {int(loader.batches)}, and the other ranks would wait for the rest: let __len__ "
        "return what __iter__ yields, or leave __len__ out, so that ranks agree before each step"
    )


class Step(TrainStep):
    """One optimizer step of a Module: what happens for each micro-batch, and who is told."""

    def __init__(self, run: Run, prepared: PreparedModel) -> None:
        module, strategy, hooks = run.module, run.strategy, run.hooks
        self.clip = run.trainer.gradient_clip
        self.batch_idx = 0
        self._micro_batches = 0
        self._weights: list[float] | None = None
        self.loss: Tensor | None = None
        self._run = run
        self._module = module
        self._progress = run.progress
        self._logged = run.train_values
        self._call = prepared.module
        self._convert = strategy.input_converter()
        self._context: AbstractContextManager[Any] | None = strategy.precision.forward_context()
        self._takes_index = takes_batch_idx(module.training_step)
        self._detect = run.trainer.detect_anomaly
        self._stepped = False
        self._outputs: Any = None
        self._on_batch_start = hooks.of("on_train_batch_start")
        self._on_batch_end = hooks.of("on_train_batch_end")
        self._on_before_backward = hooks.of("on_before_backward")
        self._on_after_backward = hooks.of("on_after_backward")
        self._on_before_optimizer_step = hooks.of("on_before_optimizer_step")
        self._on_before_zero_grad = hooks.of("on_before_zero_grad")

    def begin(self, micro_batches: int, weights: list[float] | None = None) -> None:
        """Begin a step over so many batches, each with a weight; None: all count 1."""
        self.batch_idx = self._progress.batches
        self._micro_batches = micro_batches
        self._weights = weights
        self._logged.counts = True

    @property
    def is_under_way(self) -> bool:
        """Whether it has batches that do not count as trained on yet."""
        return self._micro_batches > 0

    def end(self) -> None:
        """Count the batches of a step that was not taken."""
        self._progress.batches += self._micro_batches
        self._micro_batches = 0

    def forward(self, micro_batch: Any) -> Tensor | None:
        """Return the loss of a batch."""
        batch = micro_batch if self._convert is None else self._convert(micro_batch)
        weight = None
        if self._weights is not None:
            weight = self._weights[self.batch_idx - self._progress.batches]
            # A batch that is repeated to keep step with other ranks was counted before.
            self._logged.counts = weight != 0.0
        self._logged.batch = batch
        for hook in self._on_batch_start:
            hook(batch, self.batch_idx)
        arguments = (batch, self.batch_idx) if self._takes_index else (batch,)
        if self._context is None:
            outputs = self._call("training_step", *arguments)
        else:
            with self._context:
                outputs = self._call("training_step", *arguments)
        self._outputs = outputs
        loss = outputs if outputs.__class__ is Tensor else self._loss_in(outputs)
        self.loss = loss
        if self._detect and loss is not None:
            self._check_finite(loss)
        return loss if weight is None or loss is None else loss * weight

    def before_backward(self, loss: Tensor) -> None:
        """Tell the hooks."""
        for hook in self._on_before_backward:
            hook(loss)

    def after_backward(self) -> None:
        """Tell the hooks."""
        for hook in self._on_after_backward:
            hook()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Tell the hooks."""
        for hook in self._on_before_optimizer_step:
            hook(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the step, let schedulers step, and tell the hooks.

        Batches count as trained on once their step is taken, all together: a checkpoint saved
        between two micro-batches resumes with the first of them.
        """
        self._progress.global_step += 1
        self.end()
        self._stepped = True
        if self._run.schedulers:
            self._run.step_schedulers("step", self._progress.global_step)
        for hook in self._on_before_zero_grad:
            hook(optimizer)

    def after_micro_batch(self, micro_batch: Any) -> None:
        """Tell the hooks, then hand the step's values on."""
        if self._on_batch_end:
            outputs = self._outputs
            if not isinstance(outputs, dict):
                outputs = {"loss": None if self.loss is None else self.loss.detach()}
            for hook in self._on_batch_end:
                hook(outputs, self._logged.batch, self.batch_idx)
        self.batch_idx += 1
        if self._stepped:
            self._stepped = False
            if self._logged.row:
                self._logged.end_step(self._progress.global_step - 1)

    def manual(self, prepared: PreparedModel, step: TrainStep, micro_batches: list[Any]) -> None:
        """Take the place of `Strategy.train_step` where `training_step` steps the optimizers."""
        for micro_batch in micro_batches:
            before = self._progress.global_step
            with self._run.strategy.backward_in_forward(prepared):
                self.forward(micro_batch)
            self.end()
            self._stepped = self._progress.global_step > before
            self.after_micro_batch(micro_batch)

    def _loss_in(self, outputs: Any) -> Tensor | None:
        if not self._module.automatic_optimization:
            return None
        if outputs is None:
            if self._run.strategy.world_size > 1:
                raise UserCodeError(
                    f"{type(self._module).__name__}.training_step returned None for batch "
                    f"{self.batch_idx}, which skips it; with {self._run.strategy.world_size} ranks "
                    "the others would wait for its gradients: return a loss on every rank, such as "
                    "0.0 times the output"
                )
            return None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            return loss
        raise UserCodeError(
            f"{type(self._module).__name__}.training_step returned {_described(outputs)}; expected "
            "the loss (a scalar tensor), a dict with the key 'loss', or None to skip the batch"
        )

    def _check_finite(self, loss: Tensor) -> None:
        if not bool(loss.detach().isfinite().all()):
            raise NonFiniteLossError(
                f"the loss of batch {self.batch_idx} in epoch {self._progress.epoch} (after "
                f"{self._progress.global_step} optimizer steps) is {loss.detach().tolist()}; "
                "expected a finite number: look at the batch, the learning rate and divisions by 0"
            )

    def explain(self, error: RuntimeError) -> UserCodeError | None:
        """Return a better error for one that a step ended with, or None.

        What makes a loss unusable is looked for here, after backward has failed, so that a good
        step does not pay for it.
        """
        loss = self.loss
        if loss is None or isinstance(error, StratagemError):
            return None
        who = f"{type(self._module).__name__}.training_step"
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
        return None


def takes_batch_idx(method: Any) -> bool:
    """Whether a step method takes (batch, batch_idx), not (batch) alone."""
    parameters = inspect.signature(method).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def anomaly_detection(enabled: bool) -> AbstractContextManager[Any]:
    """Return torch's anomaly detection, or a context that does nothing."""
    if not enabled:
        return nullcontext()
    import torch

    return torch.autograd.set_detect_anomaly(True, check_nan=True)


def _described(outputs: Any) -> str:
    if isinstance(outputs, dict):
        return f"a dict with the keys {sorted(map(str, outputs))}"
    return f"a {type(outputs).__name__}"
