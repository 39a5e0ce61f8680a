"""The training loop, from the first epoch to the last; it reads top to bottom."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from stratagem.trainer.checks import check_steps_of_epoch, new_parameter_check
from stratagem.trainer.loops.divergence import DivergenceCheck
from stratagem.trainer.step.step import EndOfEpoch, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.run import Run


def fit(run: Run, prepared: PreparedModel, step: Step) -> None:
    """Train until a limit is reached or `Trainer.should_stop` is set.

    Args:
        run: a fit with open data.
        prepared: the prepared model.
        step: the optimizer step.
    """
    data = run.fit_data
    assert data is not None
    module, progress, hooks, validation = run.module, run.progress, run.hooks, run.validation
    train_steps = _train_steps(run, prepared, step, data.loader)
    # Submodules of a model in training mode keep theirs: they may be frozen.
    if not module.training:
        module.train()
    is_fresh = not (progress.epoch or progress.batches or progress.epoch_is_done)
    is_begun = run.trainer._reads_before_hooks and is_fresh and data.loader.batches > 0
    if is_begun:
        data.loader.set_epoch(0)
        data.loader.begin_epoch(0, 0)
    hooks.call("on_train_start")
    validation.start_clock()
    data.rank_state.begin_training()
    check_parameters = new_parameter_check(run)
    try:
        if progress.epoch_is_done:
            # Resumed from a checkpoint that was saved in or after the epoch's last validation.
            if validation.is_missing(data.loader.batches):
                validation.run(prepared)
            _end_epoch(run)
            progress.next_epoch()
        # No batch at all was asked for with limit_train_batches=0.
        while data.loader.batches > 0 and not _is_finished(run):
            epoch = progress.epoch
            if _reloads_data(run):
                data = run.reopen_training()
                train_steps = _train_steps(run, prepared, step, data.loader)
            if not is_begun:
                data.loader.set_epoch(epoch)
            validates = validation.is_in_epoch(epoch)
            interval = validation.interval(data.loader.batches) if validates else 0
            hooks.call("on_train_epoch_start")
            check_parameters()
            run.metrics.in_step = True
            if not is_begun:
                data.rank_state.begin_epoch()
            is_begun = progress.end_begun = False
            before = replace(progress)
            # What follows sees the epoch as finished: a checkpoint that is saved from here on
            # resumes with the epoch's end. A stop in the middle leaves it unfinished.
            progress.epoch_is_done, may_validate = train_steps(interval)
            if progress.epoch_is_done:
                run.schedulers.step("epoch", epoch + 1)
                if may_validate and validation.is_missing(data.loader.batches):
                    validation.run(prepared)
            _end_epoch(run)
            if not progress.epoch_is_done:
                break
            check_steps_of_epoch(run, before)
            progress.next_epoch()
        if not (_has_all_steps(run) or _has_all_epochs(run)):
            _stop_together(run)
        run.strategy.end_training(prepared)
        with module.logging_to(None):
            hooks.call("on_train_end")
    except RuntimeError as error:
        explained = step.explain(error) or run.strategy.explain(prepared, error)
        if explained is None:
            raise
        raise explained from error


def _end_epoch(run: Run) -> None:
    """Take the last step of schedulers that wait for a value, and end the epoch.

    A signal that came in its validation ends the fit here, before the next epoch's first step.
    """
    run.schedulers.step_after_step(run.is_metric_pending)
    run.end_train_epoch()
    if run.interruption.check_between_epochs():
        run.interrupt()


def _train_steps(
    run: Run, prepared: PreparedModel, step: Step, loader: TrainLoader
) -> Callable[[float], tuple[bool, bool]]:
    """Return a function that takes the optimizer steps of an epoch.

    The function's argument is the number of batches between two validations (0: no validation). It
    returns whether the epoch is done, and whether it may end with a validation.
    """
    trainer, progress, validation = run.trainer, run.progress, run.validation
    take_step = run.profiling.wrap("run_training_batch", step.step_function())
    ends_here = _check_after_step(run, prepared, loader)
    divergence = _divergence_check(run, prepared)

    def train_steps(interval: float) -> tuple[bool, bool]:
        accumulate = run.accumulation(progress.epoch)
        end = loader.end
        # A checkpoint is saved before the validation of its step, and before the step of schedulers
        # that wait for a value: a resumed run begins with both.
        if progress.validated < progress.batches < end and validation.is_due(interval):
            validation.run(prepared)
        if 0 < progress.batches < end:
            run.schedulers.step_after_step(run.is_metric_pending)
            if run.should_stop() or _has_all_steps(run):
                return False, False
        for micro_batches in step.micro_batches(loader, accumulate):
            progress.last_step = count = len(micro_batches)
            step.start(count, loader.weights)
            take_step(prepared, step, micro_batches)
            step.finish()
            if run.deferred_saves:
                run.flush_deferred_saves()
            if progress.batches < end and validation.is_due(interval):
                validation.run(prepared)
            if divergence is not None:
                divergence.check(progress.global_step, step.has_loss)
            if ends_here():
                run.interrupt()
            if progress.global_step >= trainer.options.max_steps >= 0:
                break
            if trainer.should_stop and run.should_stop():
                if progress.batches < end:
                    _stop_together(run)
                break
        else:
            loader.check_end(progress.batches)
            return True, True
        return progress.batches >= end, True

    def until_the_end(interval: float) -> tuple[bool, bool]:
        try:
            return train_steps(interval)
        except EndOfEpoch as end:
            # The current step is dropped; the epoch may have ended with the end of its data.
            step.abandon()
            if end.data_has_ended:  # within a step, which may have read some of its batches
                loader.check_end(progress.batches, took_all=False)
            return True, end.data_has_ended

    return run.profiling.wrap("run_training_epoch", until_the_end)


def _stop_together(run: Run) -> None:
    """Wait until all ranks stop here: a rank that goes on would wait for this one in vain."""
    run.strategy.ranks.end_together(
        f"stops after step {run.progress.global_step} (Trainer.should_stop="
        f"{run.trainer.should_stop})"
    )


def _check_after_step(run: Run, prepared: PreparedModel, loader: TrainLoader) -> Callable[[], bool]:
    """Return a function that checks after each step whether the fit is interrupted.

    If needed, it also validates by time, and steps schedulers that wait for a value.
    """
    ends_here, progress, validation = run.interruption_check(), run.progress, run.validation
    by_time, by_value = validation.seconds is not None, run.schedulers.have_values_by_steps
    if not by_time and not by_value:
        return ends_here

    def check() -> bool:
        if by_time:
            validation.run_if_time(prepared)
        # After an epoch's last step, validation has not run yet.
        if by_value and progress.batches < loader.end:
            run.schedulers.step_after_step(run.is_metric_pending)
        return ends_here()

    return check


def _divergence_check(run: Run, prepared: PreparedModel) -> DivergenceCheck | None:
    """Return the comparison of ranks, if it was requested."""
    every, ranks = run.trainer.options.detect_divergence, run.strategy.ranks
    compares = every and ranks.world_size > 1
    return DivergenceCheck(ranks, prepared.original, every) if compares else None


def _has_all_steps(run: Run) -> bool:
    return 0 <= run.trainer.options.max_steps <= run.progress.global_step


def _has_all_epochs(run: Run) -> bool:
    return 0 <= run.trainer.options.max_epochs <= run.progress.epoch


def _is_finished(run: Run) -> bool:
    progress = run.progress
    # The run that saved the checkpoint of a last step had yet to end its epoch.
    has_no_end = progress.batches > 0 and not progress.end_begun
    is_over = (_has_all_steps(run) or run.should_stop()) and not has_no_end
    return is_over or _has_all_epochs(run)


def _reloads_data(run: Run) -> bool:
    """Return whether the loaders have to be created again before the current epoch."""
    every, progress = run.trainer.options.reload_dataloaders_every_n_epochs, run.progress
    is_first = progress.batches > 0 or not run.has_ended_epoch
    return every > 0 and not is_first and progress.epoch % every == 0


def anomaly_detection(enabled: bool) -> AbstractContextManager[Any]:
    """Return torch's anomaly detection, or a context that does nothing."""
    return torch.autograd.set_detect_anomaly(True, check_nan=True) if enabled else nullcontext()
