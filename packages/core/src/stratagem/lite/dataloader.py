"""LiteDataLoader: a data loader that moves its batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stratagem.checkpoint.forms import Count
from stratagem.data.combined_loader import CombinedLoader, parts_of
from stratagem.data.sharding import UNKNOWN, is_iterable, length_of, set_epoch
from stratagem.interfaces.accelerator import Accelerator
from stratagem.rng import rng_state, set_rng_state, try_rng_state
from stratagem.state.rank_states import RankStates

if TYPE_CHECKING:
    from stratagem.data.resume.combined import CombinedResumable
    from stratagem.data.resume.resumable import Resumable

FORM = {"epoch": Count, "batches": Count, "random": dict, "loader": dict}
"""The form of `LiteDataLoader.state_dict`."""


class Reading:
    """The data loaders that a loop is reading.

    Attributes:
        active: the loaders in an iteration; the last one has yielded the current batch.
        latest: the loader that yielded a batch last, also after its end; None: no loader has
            yielded a batch yet.
    """

    def __init__(self) -> None:
        self.active: list[LiteDataLoader] = []
        self.latest: LiteDataLoader | None = None

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last; False if the epoch's length is unknown."""
        return bool(self.active) and self.active[-1].is_at_end

    def samples(self) -> tuple[int, int, bool]:
        """Return the samples that this rank reads, as `Lite.gather_for_metrics` counts them.

        Returns:
            The number of samples, the number of samples that another rank reads too, and whether
            both numbers describe the current batch (True) or the finished epoch. The numbers are -1
            and 0 if data are not divided by sample.
        """
        loader, within = self.latest, self.latest in self.active
        end = None if loader is None else loader.resumable.end_of_epoch()
        if loader is None or end is None or not (within or loader.is_at_end):
            return -1, 0, within
        own, last, repeated = end
        if not within:
            return own, repeated, within
        if loader.is_at_end:
            return last, repeated, within
        return loader.resumable.batch_size, 0, within

    def begin_batch(self, loader: LiteDataLoader) -> None:
        """Record that a loader yields a batch."""
        if self.latest is not loader or loader not in self.active:
            self.end(loader)
            self.active.append(loader)
            self.latest = loader

    def end(self, loader: LiteDataLoader) -> None:
        """Record that a loader's iteration has ended."""
        self.active = [other for other in self.active if other is not loader]


class LiteDataLoader:
    """A data loader that moves batches to the device, with the attributes of the user's loader.

    `Lite.save` saves its position and the RNG states of every rank. After `Lite.load`, the next
    loop continues from that position: within an epoch with the next batch, after the last batch
    with the next epoch. A loop that ended with `break` is within an epoch.

    Args:
        loader: the loader of this rank.
        move: moves a batch to the device; None: batches are not moved.
        name: the name of the loader in messages.
        rank: the rank of this process.
        shard: this rank's part of the data, (index, count).
        rng_of: this rank's accelerator and device, for saving and restoring their RNG states too.
        reading: records each batch.

    Attributes:
        resumable: the loader in a form that can start at any batch.
        is_at_end: whether the batch yielded last is the last batch of the epoch.
    """

    def __init__(
        self,
        loader: Any,
        move: Callable[[Any], Any] | None,
        name: str = "the data loader",
        rank: int = 0,
        shard: tuple[int, int] = (0, 1),
        *,
        rng_of: tuple[Accelerator, torch.device] | tuple[()] = (),
        reading: Reading | None = None,
    ) -> None:
        # Imported here: not every loop needs a data loader of Lite.
        from stratagem.data.resume import make_resumable
        from stratagem.data.resume.combined import CombinedResumable

        self.loader = loader
        self._move = move
        self._rng_of = rng_of
        self._rank = rank
        self.resumable: Resumable | CombinedResumable
        if isinstance(loader, CombinedLoader):
            self.resumable = CombinedResumable(loader, name, rank, shard, is_numbered=True)
        else:
            self.resumable = make_resumable(loader, name, rank, shard)
        self._epoch = 0
        """The epoch of the next iteration, unless the user sets the epoch."""
        self._last = 0
        self._begun: Any = None
        """The iterator of the current epoch; None: between two epochs."""
        self._done = 0
        """Batches of the current epoch that `_begun` does not count."""
        self._random: dict[str, Any] | None = None
        self._reading = reading or Reading()
        self._end = 0.0
        """Number of batches in the current epoch; infinity: unknown."""
        self.is_at_end = False

    @property
    def sampler(self) -> Any:
        """The loader's sampler.

        None: the loader has no sampler.
        """
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Without set_epoch, a distributed sampler repeats the same order in every epoch. If the
        # user sets the epoch, the user's value stays.
        if getattr(self.sampler, "epoch", self._last) == self._last:
            for loader in parts_of(self.loader):
                set_epoch(loader, self._epoch)
            self._last = self._epoch
            self._epoch += 1
        if self._begun is not None:
            self._done = 0  # the previous loop was left early, and this is another epoch
        batches, _ = self.resumable.begin(self._present_epoch(), self._done, length_of(self.loader))
        if self._random is not None:
            # Last, because the loader has drawn random numbers itself.
            set_rng_state(self._random, *self._rng_of)
            self._random = None
        # A DataLoader's iterator has counted the batches that it skipped.
        self._done -= getattr(batches, "_num_yielded", 0)
        self._begun = batches
        done = self._batches_done()
        left = self.resumable.batches_left(done)
        if left == UNKNOWN and not is_iterable(self.loader):
            left = length_of(self.loader) - done
        self._end = done + left
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        ready = batches if hasattr(batches, "_num_yielded") else self._counted(batches)
        if self._move is not None:
            ready = map(self._move, ready)
        self.is_at_end = False
        try:
            for batch in ready:
                self.is_at_end = self._batches_done() >= self._end
                self._reading.begin_batch(self)
                yield batch
        finally:
            self._reading.end(self)
        if self._begun is batches:
            self._begun, self._done = None, 0

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count batches of an iterator without a counter; a DataLoader's iterator has a counter."""
        for batch in batches:
            self._done += 1
            yield batch

    def _batches_done(self) -> int:
        """Return the number of batches yielded in the current epoch."""
        done: int = self._done + getattr(self._begun, "_num_yielded", 0)
        return done

    def _present_epoch(self) -> int:
        epoch: int = getattr(self.sampler, "epoch", self._last)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data, and its RNG states."""
        batches = self._batches_done()
        return {
            "epoch": self._present_epoch() if batches else self._epoch,
            "batches": batches,
            "random": rng_state(*self._rng_of),
            "loader": self.resumable.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this rank's `state_dict`, with an unchanged number of ranks."""
        self.resume(RankStates([state] * (self._rank + 1), FORM))

    def resume(self, states: RankStates) -> None:
        """Resume from the state dicts of all ranks.

        With more ranks than saved states, the additional ranks keep their own RNG states.
        """
        first = states[0]
        batches, self._epoch = first["batches"], first["epoch"]
        self._begun = None
        self._done = self.resumable.resume(states.of("loader"), batches)
        if self._rank < len(states):
            # Set them again when the iteration begins, so that it draws the same random numbers.
            random = states[self._rank]["random"]
            try_rng_state(random)
            set_rng_state(random, *self._rng_of)
            self._random = random if batches else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
