"""The loaders of a run on this rank: made at its start, and anew where that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.data.combined_loader import CombinedLoader
from stratagem.data.sharding import in_order
from stratagem.rng import rng_state, set_rng_state
from stratagem.trainer.loaders.loaders import EvaluationLoader, evaluation_loaders, source_of
from stratagem.trainer.loaders.train_loader import TrainLoader
from stratagem.trainer.resume.rank_state import RankState

if TYPE_CHECKING:
    from stratagem.trainer.run import Run


def open_fit_data(run: Run) -> TrainLoader:
    """Make this rank's loaders of a fit, for training and for validation.

    Raises:
        UserCodeError: one cannot be used.
    """
    rng_of = (run.strategy.accelerator, run.strategy.device)
    # In the order in which they are read first, and training draws the same random numbers with a
    # sanity check and without it: so do methods that draw some, as in the library that our users
    # come from. A fit that is resumed keeps to it, though it checks nothing.
    if run.progress.epoch == 0 and run.trainer.num_sanity_val_steps != 0:
        random = rng_state(*rng_of)
        _open_validation(run)
        set_rng_state(random, *rng_of)
        loader = _open_training(run)
    else:
        loader = _open_training(run)
        _open_validation(run)
    run.rank_state = RankState(
        run.strategy.ranks,
        run.progress,
        loader,
        [one.loader for one in run.validation.loaders],
        rng_of=rng_of,
    )
    return loader


def _open_training(run: Run) -> TrainLoader:
    trainer = run.trainer
    source = source_of("train_dataloader", run.job, run.job.loaders, needed=True)
    loader = run.train_loader = TrainLoader(
        _in_order(source) if trainer.overfit_batches else source,
        run.strategy,
        limit=trainer.limits["train"],
        use_distributed_sampler=trainer.use_distributed_sampler,
        reads=run.profiling.reads,
    )
    return loader


def _open_validation(run: Run) -> None:
    trainer = run.trainer
    if trainer.limits["val"] != 0 and run.module.defines("validation_step"):
        given = source_of("val_dataloader", run.job, run.job.val_loaders, needed=False)
        if given is not None:
            given = _in_order(given) if trainer.overfit_batches else given
            run.validation.loaders = open_evaluation_data(run, given, "validation")


def _in_order(source: Any) -> Any:
    return source.map(in_order) if isinstance(source, CombinedLoader) else in_order(source)


def open_evaluation_data(run: Run, source: Any, what: str) -> list[EvaluationLoader]:
    """Make this rank's loaders for "validation", "test" or "predict"."""
    loaders = run.evaluation_loaders[what] = evaluation_loaders(
        source,
        run.strategy,
        what=what,
        limit=run.trainer.limits["val" if what == "validation" else what],
        use_distributed_sampler=run.trainer.use_distributed_sampler,
    )
    return loaders


def reopen_for_resume(run: Run) -> None:
    """Make the loaders of the epoch that is resumed, where they are made anew every few epochs.

    The user's methods see the epoch in which the run that is resumed has called them.
    """
    every, progress = run.trainer.reload_dataloaders_every_n_epochs, run.progress
    if every and progress.epoch >= every:
        epoch, progress.epoch = progress.epoch, progress.epoch - progress.epoch % every
        try:
            open_fit_data(run)
        finally:
            progress.epoch = epoch


def data_of(run: Run) -> tuple[TrainLoader, RankState]:
    """Return what was opened for a fit."""
    assert run.train_loader is not None
    assert run.rank_state is not None
    return run.train_loader, run.rank_state


def reopen_in_epoch(run: Run) -> bool:
    """Make the loaders anew at the start of an epoch; return whether that was due."""
    every, progress = run.trainer.reload_dataloaders_every_n_epochs, run.progress
    is_first = progress.batches > 0 or not run.has_ended_epoch
    if not every or is_first or progress.epoch % every:
        return False
    close(run)
    open_fit_data(run)
    return True


def close(run: Run) -> None:
    """Let go of the training data."""
    if run.train_loader is not None:
        run.train_loader.close()
