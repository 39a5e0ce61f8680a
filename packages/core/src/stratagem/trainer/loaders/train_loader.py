"""The data of a fit on this rank: TrainLoader groups batches into the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem.data.combined_loader import CombinedLoader, parts_of
from stratagem.data.resume import make_resumable
from stratagem.data.resume.combined import CombinedResumable
from stratagem.data.sharding import UNKNOWN, batch_size_of, is_iterable, length_of
from stratagem.errors import CheckpointMismatchError, UserCodeError
from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.rng import rng_state, set_rng_state
from stratagem.runtime.uneven_inputs import UnevenInputs, remedy_for
from stratagem.trainer.loaders.loaders import (
    EvaluationLoader,
    Limit,
    Sharder,
    in_order_if_overfit,
    limit_batches,
    open_validation,
    set_epoch_of,
    shard,
    sharder_of,
    source_of,
    train_source,
)
from stratagem.trainer.resume.rank_state import RankState
from stratagem.trainer.step.loss_weight import LossWeights, defines_loss_weight

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Strategy
    from stratagem.trainer.context import RunContext
    from stratagem.trainer.resume.epoch_state import EpochState

NAME = "the training data loader"

Weigh = Callable[[list[Any], Sequence[float] | None], Sequence[float | Tensor]]

_ENDLESS = 2**62
"""Replaces an unknown number of batches when ranks compare their numbers."""


class TrainLoader:
    """The training batches of one rank: sharded, resumable and limited.

    Create it on every rank, once in a fit. All ranks agree on the number of batches.

    Args:
        source: a DataLoader or another iterable of batches, or several.
        strategy: the strategy of the ranks that share the data.
        limit: the argument `limit_train_batches`.
        sharder: shards the data over the ranks. None: every rank reads all data.
        reads: a function that wraps an iterator for profilers. It takes an action's name and the
            iterator.
        weigh: a function that takes the micro-batches of a step and their weights, and returns the
            weights to use. The micro-batches are then read before the step.

    Attributes:
        batches: the number of batches in an epoch, the same on every rank; infinity if unknown.
        end: the number of finished batches at the end of the current epoch; infinity if unknown.
        weights: the factors of the losses of the current step's micro-batches. None: 1 for each.

    Raises:
        UserCodeError: if the source is not iterable or is empty, or if ranks have different numbers
            of batches.
    """

    def __init__(
        self,
        source: Any,
        strategy: Strategy,
        *,
        limit: Limit,
        sharder: Sharder | None,
        reads: Callable[[str, Iterator[Any]], Iterator[Any]],
        weigh: Weigh | None = None,
    ) -> None:
        # The order matters: each step works on the data that the previous step has left.
        sharded = shard(
            train_source(source), strategy, name=NAME, by=sharder, what="train", limit=limit
        )
        ranks = strategy.ranks
        combines = isinstance(sharded, CombinedLoader)
        make = CombinedResumable if combines else make_resumable
        self._data = make(sharded, NAME, ranks.global_rank, ranks.data_split)
        self.loader = self._data.loader
        self.batches = limit_batches(
            length_of(sharded), limit, name=NAME, limit_name="limit_train_batches"
        )
        self._strategy = strategy
        self._reads = reads
        self._weigh = weigh
        self._uneven: UnevenInputs | None = None
        self._agree()
        self.end = self.batches
        self.weights: Sequence[float | Tensor] | None = None
        self._epoch: Iterator[Any] = iter(())
        self._done = 0

    def _agree(self) -> None:
        """Compare the ranks' numbers of batches, once before training.

        If all lengths are known, equal and reliable, no further comparison is needed. Otherwise
        ranks compare before each optimizer step. The length of an IterableDataset is not reliable,
        because it is often the length of all ranks' data together.
        """
        strategy, ranks = self._strategy, self._strategy.ranks
        if ranks.world_size == 1:
            return
        known = length_of(self.loader) != UNKNOWN
        relied_on = known and not any(map(is_iterable, parts_of(self.loader)))
        own = _ENDLESS if self.batches == UNKNOWN else int(self.batches)
        most, fewest, all_known, all_relied_on = (
            abs(number)
            for number in ranks.all_reduce_ints([own, -own, -int(known), -int(relied_on)], "max")
        )
        joins, kind = strategy.join_uneven_inputs, type(strategy).__name__
        if most != fewest and not joins and all_known:
            batches = ranks.gather_objects(own)
            listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(batches))
            raise UserCodeError(
                f"{NAME} has different numbers of batches on the ranks ({listed}), and every "
                f"optimizer step needs one from each: {remedy_for(fewest, kind)}"
            )
        if most != fewest or not all_relied_on:
            self.batches = UNKNOWN if most == _ENDLESS else most
            self._uneven = UnevenInputs(NAME, ranks, strategy=kind, joins=joins)

    @property
    def compares_ranks(self) -> bool:
        """Whether ranks compare their numbers of batches before each step."""
        return self._uneven is not None

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a batch of the first loader; None if it is unknown."""
        return batch_size_of(parts_of(self.loader)[0])

    # -- an epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's samplers."""
        set_epoch_of(self.loader, epoch)

    def begin_epoch(self, epoch: int, done: int) -> None:
        """Begin an epoch after its first `done` batches."""
        batches, last = self._data.begin(epoch, done, self.batches)
        self._epoch = self._reads("train_dataloader_next", batches)
        self._done = done
        self.end = min(self.batches, done + self._data.left)
        if self._uneven is not None:
            self._uneven.remember(last)

    def steps(self, accumulate: int) -> Iterator[Collection[Any]]:
        """Yield the micro-batches of each optimizer step of this epoch.

        If their number is certain and their losses have no weights, micro-batches are read one at a
        time during the step. Otherwise all are read before the step, because each loss is divided
        by their number or their weight.

        Args:
            accumulate: the number of micro-batches in a step; the last step may have fewer.

        Raises:
            UserCodeError: the loader yields no batch, or ranks turn out to have different numbers.
        """
        if self._uneven is not None or self._weigh is not None:
            return self._read_ahead_steps(accumulate)
        if accumulate == 1:
            left = None if self.end == UNKNOWN else max(0, int(self.end) - self._done)
            # No `zip`, which would keep the batch before the last one.
            return ((batch,) for batch in islice(self._epoch, left))
        # Several ranks rely on the length in any case.
        if self._data.has_exact_length or self._strategy.ranks.data_split[1] > 1:
            return self._lazy_steps(accumulate)
        return self._read_ahead_steps(accumulate)

    def check_end(self, done: int, *, took_all: bool = True) -> None:
        """Check the number of batches at the end of `steps`; `done` is the number in this epoch.

        Warn if the loader yielded fewer batches than its length and the steps read all of them
        (`took_all`).

        Raises:
            UserCodeError: no batch, or fewer batches than a length that other ranks rely on.
        """
        if self._uneven is None and done < self.end and self._strategy.ranks.data_split[1] > 1:
            raise UserCodeError(_broken_promise(done, self.end))
        if done == 0:
            raise UserCodeError(
                f"{NAME} yielded no batch; expected at least one in each epoch: a generator can be "
                "read only once, so pass a DataLoader or a list"
            )
        if took_all and done < self.end != UNKNOWN:
            rank_zero_warn(
                f"{NAME} yielded {done} batches, but its length promised {int(self.end)}: the "
                "epoch ends after those. Let __len__ return the number that __iter__ yields, or "
                "leave __len__ out"
            )

    def _lazy_steps(self, accumulate: int) -> Iterator[Collection[Any]]:
        done, end = self._done, min(self.end, self._done + self._data.batches_left(self._done))
        while done < end:
            # Read the first micro-batch before the step begins, so that an error of the loader is
            # not reported as an error within a step. No variable keeps the batch afterwards.
            first = list(islice(self._epoch, 1))
            if not first:
                return
            count = int(min(accumulate, end - done))
            batches = chain(_taken_out(first), islice(self._epoch, count - 1))
            yield MicroBatches(batches, count, done, self.end)
            done += count

    def _read_ahead_steps(self, accumulate: int) -> Iterator[Collection[Any]]:
        done = self._done
        while done < self.end:
            ahead = list(islice(self._epoch, int(min(accumulate, self.end - done))))
            joined: list[float] | None = None
            if self._uneven is not None:
                ahead, joined = self._uneven.next_step(ahead, done)
            if not ahead:
                return
            self.weights = joined if self._weigh is None else self._weigh(ahead, joined)
            count = len(ahead)
            yield MicroBatches(_taken_out(ahead), count, done, self.end)
            done += count

    # -- resuming

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's position in its data, as safe data. See `Resumable.state`."""
        return self._data.state(within_epoch=within_epoch)

    def resume(self, states: Sequence[dict[str, Any]], done: int) -> int:
        """Restore the states of the saving ranks; return the number of finished batches.

        Args:
            states: the states in the order of the saving ranks.
            done: the number of batches of the epoch that each saving rank had trained on.
        """
        saved, now = _described(states[0]), "one loader"
        if isinstance(self.loader, CombinedLoader):
            now = _described({"mode": self.loader.mode, "parts": self.loader.flattened})
        if saved == now:
            return self._data.resume(states, done)
        if done == 0:
            return 0  # the epoch begins with the present data
        raise CheckpointMismatchError(
            f"the checkpoint was saved in the middle of an epoch, with {saved} as {NAME}, and now "
            f"it is {now}: resume with what it was saved with, or from a checkpoint of the end of "
            "an epoch"
        )

    def close(self) -> None:
        """Release the data at the end of a fit."""
        self._epoch = iter(())
        self._data.close()


def open_training(context: RunContext) -> TrainLoader:
    """Return this rank's training loader.

    Raises:
        UserCodeError: the loader is missing or unusable.
    """
    trainer, job = context.trainer, context.job
    source = source_of("train_dataloader", job, job.loaders, needed=True)
    weighs = context.policy.weighs_losses and defines_loss_weight(job.model)
    return TrainLoader(
        in_order_if_overfit(source, trainer),
        trainer.strategy,
        limit=trainer.options.limit_train_batches,
        sharder=sharder_of(trainer),
        reads=context.profiling.reads,
        weigh=LossWeights(job.model, trainer.strategy.ranks) if weighs else None,
    )


class FitData:
    """This rank's data in a fit.

    Args:
        context: the run.
        epoch: the values of the current epoch, for checkpoints.
        opened: the loaders of the run by "validation", "test" or "predict"; receives the
            validation loaders.

    Attributes:
        loader: the training batches.
        rank_state: the RNG states and the position in the data, for checkpoints.

    Raises:
        UserCodeError: a loader cannot be used.
    """

    def __init__(
        self, context: RunContext, epoch: EpochState, opened: dict[str, list[EvaluationLoader]]
    ) -> None:
        self._context = context
        self._state = context.state
        self._options = context.trainer.options
        self._epoch = epoch
        self._opened = opened
        self._open()

    def _open(self) -> None:
        context, strategy = self._context, self._context.strategy
        rng_of = (strategy.accelerator, strategy.device)
        # The user's methods may draw random numbers. As in Lightning, training draws the same ones
        # with a sanity check and without it. A resumed fit checks nothing and keeps to that order.
        if self._state.epoch == 0 and self._options.num_sanity_val_steps != 0:
            random = rng_state(*rng_of)
            self._opened["validation"] = open_validation(context)
            set_rng_state(random, *rng_of)
            loader = open_training(context)
        else:
            loader = open_training(context)
            self._opened["validation"] = open_validation(context)
        self._use(loader)

    def _use(self, loader: TrainLoader) -> None:
        strategy = self._context.strategy
        self.loader = loader
        self.rank_state = RankState(
            strategy.ranks,
            self._state,
            loader,
            [one.loader for one in self.validation],
            epoch=self._epoch,
            rng_of=(strategy.accelerator, strategy.device),
            module=self._context.module,
        )

    @property
    def validation(self) -> list[EvaluationLoader]:
        """The validation loaders; []: there is no validation."""
        return self._opened["validation"]

    def reloads_training(self) -> bool:
        """Return whether the training loader has to be created again before the current epoch."""
        every, state = self._options.reload_dataloaders_every_n_epochs, self._state
        is_first = state.batches > 0 or not state.has_ended_epoch
        return every > 0 and not is_first and state.epoch % every == 0

    def reloads_validation(self) -> bool:
        """Return whether the loaders have to be created again before the next validation."""
        state, options = self._state, self._options
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
        self._use(open_training(self._context))
        for one in parts_of(self.loader.loader) if draws else ():
            if isinstance(one, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=one.generator)

    def reopen_validation(self) -> None:
        """Create the validation loaders again."""
        self._opened["validation"] = open_validation(self._context)
        self.rank_state.validation = [one.loader for one in self.validation]

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


class MicroBatches(Collection[Any]):
    """The micro-batches of one optimizer step, read one at a time; can be iterated once.

    Their number is known before. A micro-batch is released once it was yielded.

    Args:
        batches: an iterator of the micro-batches.
        count: the number of micro-batches.
        done: the number of earlier batches in the epoch.
        promised: the number of batches in the epoch, for the error if the loader yields fewer.
    """

    def __init__(self, batches: Iterator[Any], count: int, done: int, promised: float) -> None:
        self._batches = batches
        self._count = count
        self._done = done
        self._promised = promised

    def __len__(self) -> int:
        return self._count

    def __contains__(self, batch: object) -> bool:
        raise TypeError("the micro-batches of a step can be iterated over once, and not searched")

    def __iter__(self) -> Iterator[Any]:
        read = 0
        for batch in self._batches:
            read += 1
            yield batch
            del batch  # before the next one is read
        if read < self._count:
            raise UserCodeError(_broken_promise(self._done + read, self._promised))


def _described(state: dict[str, Any]) -> str:
    if "parts" not in state:
        return "one loader"
    return f"{len(state['parts'])} loaders read as {state['mode']!r}"


def _taken_out(batches: list[Any]) -> Iterator[Any]:
    """Yield the batches of a list, which holds only those that are still to come."""
    batches.reverse()
    while batches:
        yield batches.pop()


def _broken_promise(done: int, promised: float) -> str:
    return (
        f"{NAME} yielded {done} batches on this rank, but its length promised {int(promised)}, and "
        "the other ranks would wait for the rest: let __len__ return what __iter__ yields, or "
        "leave __len__ out, so that ranks agree before each step"
    )
