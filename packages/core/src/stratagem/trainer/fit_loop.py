"""The training loop, from the first epoch to the last; it reads top to bottom."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from stratagem.errors import UserCodeError
from stratagem.trainer.step import Step

if TYPE_CHECKING:
    from stratagem.distributed.uneven_inputs import UnevenInputs
    from stratagem.interfaces.prepared_model import PreparedModel
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
    ranks = run.strategy.ranks.data_shard[1]

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
                step.start(len(micro_batches), weights)
                one_step(prepared, step, micro_batches)
                step.finish()
                if run.saves_due:
                    run.save_due()
                left -= len(micro_batches)

                validation_is_due = progress.batches % validate_every < len(micro_batches)
                if validation_is_due and left > 0:
                    run.validate_during_fit(prepared)
                    validation_is_due = False
                if check is not None:
                    check.look(progress.global_step, step.has_loss)
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
    run.strategy.end_training(prepared)
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


def anomaly_detection(enabled: bool) -> AbstractContextManager[Any]:
    """Return torch's anomaly detection, or a context that does nothing."""
    if not enabled:
        return nullcontext()
    import torch

    return torch.autograd.set_detect_anomaly(True, check_nan=True)
