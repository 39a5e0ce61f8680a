"""The training loop.

fit
 |- finish_interrupted_epoch     after a resume: the rest, or only the end, of the saved epoch
 `- each epoch
     |- begin_epoch              new loaders if they are due, the order of samples, hooks
     |- train_epoch
     |   `- each step
     |       |- take_step        forward and backward of each micro-batch, clip, optimizer step
     |       |- validate         if it is due here
     |       `- after_step       what was asked for: signals, a time limit, divergence, ...
     `- end_epoch                the last validation, reduced metrics, hooks, checkpoints

`FitContext` does not change during a fit; `FitState` does, and a checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from stratagem.trainer.step.step import EndOfEpoch

if TYPE_CHECKING:
    from stratagem.strategies import DivergenceCheck
    from stratagem.trainer.context import FitContext, FitState
    from stratagem.trainer.step.step import Step


def fit(context: FitContext, state: FitState) -> None:
    """Train until a limit is reached or a stop is requested."""
    start_training(context, state)
    finish_interrupted_epoch(context, state)
    run_epoch = context.profiling.wrap("run_training_epoch", train_epoch)
    while context.data.loader.batches > 0 and not is_finished(context, state):
        begin_epoch(context, state)
        run_epoch(context, state)
        end_epoch(context, state)
    if not context.limits.reached(state):
        stop_together(context, state)
    context.strategy.end_training(context.prepared)
    with context.module.logging_to(None):
        context.hooks.call("on_train_end")


def train_epoch(context: FitContext, state: FitState) -> None:
    """Take the optimizer steps of the epoch, from the current batch on."""
    loader, step, limits = context.data.loader, context.step, context.limits
    interval = context.validation.interval_in(state.epoch, loader.batches)
    try:
        for micro_batches in step.micro_batches(loader, limits.accumulation(state.epoch)):
            take_step(context, state, micro_batches)
            if interval and state.batches < loader.end and context.validation.is_due(interval):
                context.validation.run(context.prepared)
            for check in context.after_step:
                check()
            is_reached = limits.reached(state, within_epoch=True)
            if is_reached or (state.stop_requests and stops(context, state)):
                state.epoch_is_done = state.batches >= loader.end
                break
        else:
            loader.check_end(state.batches)
            state.epoch_is_done = True
    except EndOfEpoch as end:
        drop_step(context, state, data_has_ended=end.data_has_ended)
    if state.epoch_is_done:
        context.schedulers.step("epoch", state.epoch + 1)


def take_step(context: FitContext, state: FitState, micro_batches: Collection[Any]) -> None:
    """Take one optimizer step: the strategy runs it, and `context.step` counts it."""
    step = context.step
    state.last_step = count = len(micro_batches)
    step.start(count, context.data.loader.weights)
    context.run_step(context.prepared, step, micro_batches)
    step.finish()
    if context.saves.deferred:
        context.saves.flush_deferred()


def stops(context: FitContext, state: FitState) -> bool:
    """Return whether a requested stop ends the epoch after this step; then ranks meet here."""
    if not context.limits.has_minimum(state):
        context.limits.note_delayed_stop(state)
        return False
    if state.batches < context.data.loader.end:
        stop_together(context, state)
    return True


def stop_together(context: FitContext, state: FitState) -> None:
    """Wait until all ranks stop here; otherwise the others hang in the next collective."""
    context.strategy.ranks.end_together(
        f"stops after step {state.global_step} (Trainer.should_stop={bool(state.stop_requests)})"
    )


def drop_step(context: FitContext, state: FitState, *, data_has_ended: bool) -> None:
    """End the epoch within a step, for which there are no data or which a hook has refused."""
    context.step.abandon()
    if data_has_ended:  # the step may have read some of its batches
        context.data.loader.check_end(state.batches, took_all=False)
    state.epoch_is_done, state.ended_by_hook = True, not data_has_ended


def is_finished(context: FitContext, state: FitState) -> bool:
    """Return whether no further epoch is due."""
    limits = context.limits
    # If a limit or a stop has ended the last epoch before its last batch, `end_begun` stays set.
    return state.end_begun or limits.may_stop(state) or bool(limits.reached(state))


# -- the start, and the ends of epochs


def start_training(context: FitContext, state: FitState) -> None:
    """Call the hooks of the start, and restore the random numbers of a resumed run."""
    # Submodules of a model in training mode keep theirs: they may be frozen.
    if not context.module.training:
        context.module.train()
    if begins_before_hooks(context, state):
        context.data.loader.set_epoch(0)
        context.data.loader.begin_epoch(0, 0)
    context.hooks.call("on_train_start")
    context.validation.start_clock()
    context.data.rank_state.begin_training()


def begins_before_hooks(context: FitContext, state: FitState) -> bool:
    """Return whether the fit has yet to begin, and reads before the hooks by its policy."""
    is_fresh = not (state.epoch or state.batches or state.epoch_is_done)
    return context.policy.reads_before_hooks and is_fresh and context.data.loader.batches > 0


def finish_interrupted_epoch(context: FitContext, state: FitState) -> None:
    """Finish the epoch within which the resumed checkpoint was saved, if there is one."""
    limits = context.limits
    limits.note_delayed_stop(state)
    if state.epoch_is_done:
        # Saved in or after the epoch's last validation.
        end_epoch(context, state)
    elif state.batches > 0 and context.data.loader.batches > 0 and not limits.has_all_epochs(state):
        if state.end_begun and limits.ends_epoch(state):
            return  # the run that saved it has ended the epoch here
        begin_epoch(context, state)
        context.profiling.wrap("run_training_epoch", finish_steps)(context, state)
        end_epoch(context, state)


def finish_steps(context: FitContext, state: FitState) -> None:
    """Do what was due after the saved step, and take the remaining steps of the epoch.

    A checkpoint is saved before the validation of its step, and before the step of schedulers that
    wait for a value.
    """
    loader, validation, limits = context.data.loader, context.validation, context.limits
    if state.batches < loader.end:
        interval = validation.interval_in(state.epoch, loader.batches)
        if state.validated < state.batches and validation.is_due(interval):
            validation.run(context.prepared)
        context.schedulers.step_after_step()
        if limits.ends_epoch(state):
            return
    train_epoch(context, state)


def begin_epoch(context: FitContext, state: FitState) -> None:
    """Create the training loader again if that is due, call the hooks, and begin reading."""
    data, has_begun = context.data, begins_before_hooks(context, state)
    if data.reloads_training():
        data.reopen_training(draws=context.policy.draws_at_reload)
    if not has_begun:
        data.loader.set_epoch(state.epoch)
    context.hooks.call("on_train_epoch_start")
    context.checks.begin_epoch()
    context.metrics.in_step = True
    if not has_begun:
        data.rank_state.begin_epoch()
    state.end_begun = state.ended_by_hook = False


def end_epoch(context: FitContext, state: FitState) -> None:
    """Validate if that is left, reduce the logged values, and call the hooks.

    What happens here sees the epoch as finished: a checkpoint that is saved here resumes with the
    epoch's end. After a stop in the middle the epoch stays unfinished.
    """
    validation, batches = context.validation, context.data.loader.batches
    if state.epoch_is_done and not state.ended_by_hook and validation.is_missing(batches):
        validation.run(context.prepared)
    context.schedulers.step_after_step()
    end_metrics(context, state)
    # A signal that came in the validation ends the fit before the next epoch's first step.
    context.interruption.end_between_epochs_if_due()
    if state.epoch_is_done:
        context.checks.end_epoch()
        state.next_epoch()
    context.limits.note_delayed_stop(state)


def end_metrics(context: FitContext, state: FitState) -> None:
    """Reduce the epoch's logged values, and call the hooks of its end."""
    metrics, rank_state = context.metrics, context.data.rank_state
    metrics.in_step = False
    state.end_begun = True
    if not state.epoch_is_done:
        # A run that resumes in this epoch continues from the values before this early end.
        rank_state.keep(epoch=rank_state.epoch.state())
    entries = metrics.entries
    names = {name for e in entries.values() for name in (e.name, e.step_name, e.epoch_name)}
    try:
        metrics.reduce_epoch()
        context.hooks.call_before_metrics("on_train_epoch_end")
    except BaseException:
        # A run that resumes from a checkpoint saved now ends the epoch again.
        state.end_begun, metrics.entries = False, entries
        raise
    epoch = metrics.end_epoch()
    # Loggers receive the epoch's values at its last step, with the epoch's number.
    metrics.rows.write(epoch.for_loggers, state.logged_step, state.epoch)
    state.has_ended_epoch, state.logged_in_epoch = True, names | epoch.values.keys()
    context.schedulers.step_after_epoch()
    context.hooks.call_after_metrics("on_train_epoch_end")


# -- after a step


def functions_after_step(context: FitContext, state: FitState) -> tuple[Callable[[], None], ...]:
    """Return the functions to call after each step, in this order.

    A plain fit has one of them, which looks for signals and `max_time`.
    """
    strategy, prepared, validation = context.strategy, context.prepared, context.validation
    functions: list[Callable[[], None]] = []
    if context.policy.validates_at_stop:
        functions.append(partial(_validate_at_stop, context, state))
    every = context.trainer.options.detect_divergence
    if every and strategy.ranks.world_size > 1:
        from stratagem.strategies import DivergenceCheck

        divergence = DivergenceCheck(strategy.ranks, prepared.original, every)
        functions.append(partial(_compare_ranks, divergence, context.step, state))
    if validation.seconds is not None:
        functions.append(partial(validation.run_if_time, prepared))
    if context.schedulers.have_values_by_steps:
        functions.append(partial(_step_schedulers, context, state))
    if strategy.checkpoint_io.asynchronous:
        functions.append(strategy.checkpoint_io.raise_errors)
    return (*functions, context.interruption.end_if_due)


def _validate_at_stop(context: FitContext, state: FitState) -> None:
    """Validate where a stop ends the epoch before its last batch."""
    validation, batches = context.validation, context.data.loader.batches
    if not context.limits.may_stop(state):
        return
    is_within = state.validated < state.batches < batches and validation.is_in_epoch(state.epoch)
    if is_within and not validation.is_due(validation.interval(batches)):
        validation.run(context.prepared)


def _compare_ranks(divergence: DivergenceCheck, step: Step, state: FitState) -> None:
    divergence.check(state.global_step, step.has_loss)


def _step_schedulers(context: FitContext, state: FitState) -> None:
    """Step schedulers that wait for a value; after the epoch's last step validation runs first."""
    if state.batches < context.data.loader.end:
        context.schedulers.step_after_step()
