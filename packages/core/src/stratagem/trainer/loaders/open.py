"""The data of a run on this rank: loaders for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stratagem.data.combined_loader import CombinedLoader
from stratagem.data.sharding import in_order
from stratagem.rng import rng_state, set_rng_state
from stratagem.trainer.loaders.loaders import EvaluationLoader, evaluation_loaders, source_of
from stratagem.trainer.loaders.train_loader import TrainLoader
from stratagem.trainer.resume.epoch_state import EpochState
from stratagem.trainer.resume.rank_state import RankState

if TYPE_CHECKING:
    from stratagem.trainer.run import Run


@dataclass(frozen=True)
class FitData:
    """This rank's data in a fit.

    Attributes:
        loader: its training batches.
        rank_state: its RNG states and its position in the data, which checkpoints hold.
        validation: its loaders for validation; []: there is no validation.
    """

    loader: TrainLoader
    rank_state: RankState
    validation: list[EvaluationLoader]


def open_fit_data(run: Run) -> FitData:
    """Return this rank's data of a fit.

    Raises:
        UserCodeError: a loader cannot be used.
    """
    rng_of = (run.strategy.accelerator, run.strategy.device)
    # The user's methods may draw random numbers. As in Lightning, training draws the same ones with
    # a sanity check and without it. A resumed fit checks nothing and keeps to that order.
    if run.progress.epoch == 0 and run.trainer.options.num_sanity_val_steps != 0:
        random = rng_state(*rng_of)
        validation = _open_validation(run)
        set_rng_state(random, *rng_of)
        loader = _open_training(run)
    else:
        loader = _open_training(run)
        validation = _open_validation(run)
    return _with_rank_state(run, loader, validation)


def _with_rank_state(run: Run, loader: TrainLoader, validation: list[EvaluationLoader]) -> FitData:
    strategy = run.strategy
    rank_state = RankState(
        strategy.ranks,
        run.progress,
        loader,
        [one.loader for one in validation],
        epoch=EpochState(run),
        rng_of=(strategy.accelerator, strategy.device),
        module=run.module,
    )
    return FitData(loader, rank_state, validation)


def reopen_training(run: Run) -> FitData:
    """Return the data of a fit with new training loaders."""
    assert run.fit_data is not None
    validation = run.fit_data.validation
    return _with_rank_state(run, _open_training(run), validation)


def reopen_validation(run: Run) -> FitData:
    """Return the data of a fit with new validation loaders."""
    data, validation = run.fit_data, _open_validation(run)
    assert data is not None
    data.rank_state.validation = [one.loader for one in validation]
    return replace(data, validation=validation)


def _open_training(run: Run) -> TrainLoader:
    options = run.trainer.options
    source = source_of("train_dataloader", run.job, run.job.loaders, needed=True)
    return TrainLoader(
        _in_order(source) if options.overfit_batches else source,
        run.strategy,
        limit=options.limit_train_batches,
        divide=run.trainer.make_sharded_loader if options.use_distributed_sampler else None,
        reads=run.profiling.reads,
    )


def _open_validation(run: Run) -> list[EvaluationLoader]:
    options = run.trainer.options
    if options.limit_val_batches == 0 or not run.module.defines("validation_step"):
        return []
    source = source_of("val_dataloader", run.job, run.job.val_loaders, needed=False)
    if source is None:
        return []
    return _share(run, _in_order(source) if options.overfit_batches else source, "validation")


def _in_order(source: Any) -> Any:
    return source.map(in_order) if isinstance(source, CombinedLoader) else in_order(source)


def open_evaluation_data(run: Run, what: str) -> list[EvaluationLoader]:
    """Return this rank's loaders for "validation", "test" or "predict".

    Raises:
        UserCodeError: there is none, or one cannot be used.
    """
    method = f"{'val' if what == 'validation' else what}_dataloader"
    return _share(run, source_of(method, run.job, run.job.loaders, needed=True), what)


def _share(run: Run, source: Any, what: str) -> list[EvaluationLoader]:
    options = run.trainer.options
    limits = {
        "validation": options.limit_val_batches,
        "test": options.limit_test_batches,
        "predict": options.limit_predict_batches,
    }
    return evaluation_loaders(
        source,
        run.strategy,
        what=what,
        limit=limits[what],
        divide=run.trainer.make_sharded_loader if options.use_distributed_sampler else None,
    )
