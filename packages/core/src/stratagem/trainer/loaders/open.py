"""The data of a run on this rank: loaders for training and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.combined_loader import CombinedLoader
from stratagem.data.sharding import in_order
from stratagem.rng import rng_state, set_rng_state
from stratagem.trainer.loaders.loaders import EvaluationLoader, evaluation_loaders, source_of
from stratagem.trainer.loaders.train_loader import TrainLoader
from stratagem.trainer.resume.rank_state import RankState
from stratagem.trainer.step.loss_weight import LossWeights, defines_loss_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stratagem.trainer.context import FitState
    from stratagem.trainer.job import Job
    from stratagem.trainer.resume.epoch_state import EpochState
    from stratagem.trainer.trainer import Trainer


class LoaderFactory:
    """Creates this rank's loaders from the user's loaders.

    Args:
        trainer: the Trainer, with the limits of batches and the way to shard a loader.
        job: the request, with the user's loaders and the Module.
        reads: a function that wraps an iterator for profilers.

    Attributes:
        evaluation_loaders: the latest loaders by "validation", "test" or "predict".
    """

    def __init__(
        self, trainer: Trainer, job: Job, reads: Callable[[str, Iterator[Any]], Iterator[Any]]
    ) -> None:
        self.evaluation_loaders: dict[str, list[EvaluationLoader]] = {}
        self.trainer = trainer
        self.job = job
        self._reads = reads

    def open_training(self) -> TrainLoader:
        """Return the training loader.

        Raises:
            UserCodeError: the loader is missing or unusable.
        """
        options = self.trainer.options
        source = source_of("train_dataloader", self.job, self.job.loaders, needed=True)
        return TrainLoader(
            _in_order(source) if options.overfit_batches else source,
            self.trainer.strategy,
            limit=options.limit_train_batches,
            divide=self._divide,
            reads=self._reads,
            weigh=self._weigh(),
        )

    def _weigh(self) -> LossWeights | None:
        weighs = self.trainer.policy.weighs_losses and defines_loss_weight(self.job.model)
        return LossWeights(self.job.model, self.trainer.strategy.ranks) if weighs else None

    def open_validation(self) -> list[EvaluationLoader]:
        """Return the validation loaders of a fit; []: there is no validation."""
        options, job = self.trainer.options, self.job
        source = None
        if options.limit_val_batches != 0 and job.model.defines("validation_step"):
            source = source_of("val_dataloader", job, job.val_loaders, needed=False)
        if source is not None and options.overfit_batches:
            source = _in_order(source)
        loaders = [] if source is None else self._share(source, "validation")
        self.evaluation_loaders["validation"] = loaders
        return loaders

    def open_evaluation(self, what: str) -> list[EvaluationLoader]:
        """Return the loaders for "validation", "test" or "predict".

        Raises:
            UserCodeError: a loader is missing or unusable.
        """
        method = f"{'val' if what == 'validation' else what}_dataloader"
        source = source_of(method, self.job, self.job.loaders, needed=True)
        loaders = self.evaluation_loaders[what] = self._share(source, what)
        return loaders

    @property
    def _divide(self) -> Callable[..., Any] | None:
        trainer = self.trainer
        return trainer.make_sharded_loader if trainer.options.use_distributed_sampler else None

    def _share(self, source: Any, what: str) -> list[EvaluationLoader]:
        name = f"limit_{'val' if what == 'validation' else what}_batches"
        limit = getattr(self.trainer.options, name)
        strategy, divide = self.trainer.strategy, self._divide
        return evaluation_loaders(source, strategy, what=what, limit=limit, divide=divide)


class FitData:
    """This rank's data in a fit.

    Args:
        factory: creates the loaders.
        state: the state of the training loop.
        epoch: the values of the current epoch, for checkpoints.

    Attributes:
        loader: the training batches.
        rank_state: the RNG states and the position in the data, for checkpoints.

    Raises:
        UserCodeError: a loader cannot be used.
    """

    def __init__(self, factory: LoaderFactory, state: FitState, epoch: EpochState) -> None:
        self._factory = factory
        self._state = state
        self._epoch = epoch
        self._open()

    def _open(self) -> None:
        options, strategy = self._factory.trainer.options, self._factory.trainer.strategy
        rng_of = (strategy.accelerator, strategy.device)
        # The user's methods may draw random numbers. As in Lightning, training draws the same ones
        # with a sanity check and without it. A resumed fit checks nothing and keeps to that order.
        if self._state.epoch == 0 and options.num_sanity_val_steps != 0:
            random = rng_state(*rng_of)
            self._factory.open_validation()
            set_rng_state(random, *rng_of)
            loader = self._factory.open_training()
        else:
            loader = self._factory.open_training()
            self._factory.open_validation()
        self._use(loader)

    def _use(self, loader: TrainLoader) -> None:
        strategy = self._factory.trainer.strategy
        self.loader = loader
        self.rank_state = RankState(
            strategy.ranks,
            self._state,
            loader,
            [one.loader for one in self.validation],
            epoch=self._epoch,
            rng_of=(strategy.accelerator, strategy.device),
            module=self._factory.job.model,
        )

    @property
    def validation(self) -> list[EvaluationLoader]:
        """The validation loaders; []: there is no validation."""
        return self._factory.evaluation_loaders["validation"]

    def reloads_training(self) -> bool:
        """Return whether the training loader has to be created again before the current epoch."""
        every, state = self._factory.trainer.options.reload_dataloaders_every_n_epochs, self._state
        is_first = state.batches > 0 or not state.has_ended_epoch
        return every > 0 and not is_first and state.epoch % every == 0

    def reloads_validation(self) -> bool:
        """Return whether the loaders have to be created again before the next validation."""
        state, options = self._state, self._factory.trainer.options
        every, epoch = options.reload_dataloaders_every_n_epochs, state.epoch
        if not every or state.validated:
            return False
        validated_every = options.check_val_every_n_epoch or 1
        last = max(0, epoch // validated_every * validated_every - 1)
        return epoch // every > last // every

    def reopen_training(self, *, draws: bool) -> None:
        """Create the training loader again.

        Args:
            draws: draw a number for each new DataLoader, as a further iterator would.
        """
        self.close()
        self._use(self._factory.open_training())
        loader = self.loader.loader
        several = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
        for one in several if draws else ():
            if isinstance(one, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=one.generator)

    def reopen_validation(self) -> None:
        """Create the validation loaders again."""
        loaders = self._factory.open_validation()
        self.rank_state.validation = [one.loader for one in loaders]

    def reopen(self, epoch: int) -> None:
        """Create all loaders again, with `current_epoch` set to `epoch` meanwhile."""
        self.close()
        now, self._state.epoch = self._state.epoch, epoch
        try:
            self._open()
        finally:
            self._state.epoch = now

    def close(self) -> None:
        """Release the training data."""
        self.loader.close()


def _in_order(source: Any) -> Any:
    return source.map(in_order) if isinstance(source, CombinedLoader) else in_order(source)
