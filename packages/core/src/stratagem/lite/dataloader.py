"""LiteDataLoader: a data loader whose batches are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from stratagem.data.sharding import UNKNOWN, is_iterable, length_of, set_epoch
from stratagem.interfaces.accelerator import Accelerator
from stratagem.rng import rng_state, set_rng_state
from stratagem.state.rank_states import RankStates


class Reading:
    """Which data loaders a loop is reading.

    Attributes:
        active: those in an iteration; the last of them has yielded the present batch.
        latest: the one whose batch, or whose end, came last; None: none was read yet.
    """

    def __init__(self) -> None:
        self.active: list[LiteDataLoader] = []
        self.latest: LiteDataLoader | None = None

    @property
    def is_last_batch(self) -> bool:
        """Whether the present batch is the last one of its epoch, so far as its loader knows."""
        return bool(self.active) and self.active[-1].is_at_end

    def begin_batch(self, loader: LiteDataLoader) -> None:
        """Note that a loader yields a batch."""
        if self.latest is not loader or loader not in self.active:
            self.end(loader)
            self.active.append(loader)
            self.latest = loader

    def end(self, loader: LiteDataLoader) -> None:
        """Note that a loader's iteration is over."""
        self.active = [other for other in self.active if other is not loader]


class LiteDataLoader:
    """A data loader whose batches come on the device; attributes are those of the user's loader.

    `Lite.save` keeps its place, and the RNG states of every rank. After `Lite.load` the next
    loop over it goes on from there: inside an epoch with the batch that would have come next, after
    the last one with the next epoch. A loop that was left by `break` is inside an epoch.

    Args:
        loader: of this rank.
        move: moves a batch to the device; None: it stays.
        name: stands for it in messages.
        rank: this process's.
        shard: this rank's part of the data, (index, count).
        rng_of: this rank's accelerator and device, whose RNG state is saved and restored too.
        reading: where each batch is noted.

    Attributes:
        resumable: the loader, as it is iterated over from any batch on.
        is_at_end: whether the batch that was yielded last is the epoch's last one.
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
        # Here, since a loop of the user's may need no data loader of ours.
        from stratagem.data.resume.resumable import Resumable

        self.loader = loader
        self._move = move
        self._rng_of = rng_of
        self._rank = rank
        self.resumable = Resumable(loader, name, rank, shard)
        self._epoch = 0
        """Of the next iteration, unless the user sets it by hand."""
        self._last = 0
        self._begun: Any = None
        """The present epoch's batches; None: between two epochs."""
        self._done = 0
        """Batches of the present epoch that `_begun` does not count."""
        self._random: dict[str, Any] | None = None
        self._reading = reading or Reading()
        self._end = 0.0
        """Batches of the present epoch; infinity: not known."""
        self.is_at_end = False

    @property
    def sampler(self) -> Any:
        """The loader's sampler, or None."""
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Without it a distributed sampler repeats one order in every epoch. A user who sets the
        # epoch by hand is left to it.
        if getattr(self.sampler, "epoch", self._last) == self._last:
            set_epoch(self.loader, self._epoch)
            self._last = self._epoch
            self._epoch += 1
        if self._begun is not None:
            self._done = 0  # the loop before was left, and this is another epoch
        batches, _ = self.resumable.begin(self._present_epoch(), self._done, length_of(self.loader))
        if self._random is not None:
            # Last, since the loader has drawn numbers of its own.
            set_rng_state(self._random, *self._rng_of)
            self._random = None
        # What a DataLoader has passed over, it has counted.
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
        """Count the batches of what does not count them itself, as a DataLoader's iterator does."""
        for batch in batches:
            self._done += 1
            yield batch

    def _batches_done(self) -> int:
        """Return the number of batches of the present epoch that were yielded."""
        done: int = self._done + getattr(self._begun, "_num_yielded", 0)
        return done

    def _present_epoch(self) -> int:
        epoch: int = getattr(self.sampler, "epoch", self._last)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in the data, and its RNG states."""
        batches = self._batches_done()
        return {
            "epoch": self._present_epoch() if batches else self._epoch,
            "batches": batches,
            "random": rng_state(*self._rng_of),
            "loader": self.resumable.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank, among as many ranks."""
        self.resume(RankStates([state] * (self._rank + 1)))

    def resume(self, states: RankStates) -> None:
        """Go on from what `state_dict` returned on each rank.

        Of more ranks than saved, the further ones keep their own RNG states.
        """
        first = states[0]
        batches, self._epoch = first["batches"], first["epoch"]
        self._begun = None
        self._done = self.resumable.resume(states.of("loader"), batches)
        if self._rank < len(states):
            # Once more when the iteration begins, if that is to draw what was drawn before.
            random = states[self._rank]["random"]
            set_rng_state(random, *self._rng_of)
            self._random = random if batches else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
