"""Combined loaders that resume in the middle of an epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from stratagem.data.combined_loader import CombinedLoader, Reading, total_of
from stratagem.data.resume import make_resumable
from stratagem.data.resume.resumable import OVERLAP, Begun, Resumable
from stratagem.data.sharding import length_of


class CombinedResumable:
    """Iterates over a CombinedLoader from any batch of an epoch on; see `Resumable`.

    Each loader resumes separately, after the batches that it had yielded.

    Args:
        loader: the loader of this rank.
        name, rank, shard: as for `Resumable`.

    Attributes:
        loader: the loader to iterate over.
        left: the remaining batches of the epoch, if the rest was resharded to other ranks.
        has_exact_length: whether each loader yields exactly `len(loader)` batches.
    """

    def __init__(
        self, loader: CombinedLoader, name: str, rank: int, shard: tuple[int, int]
    ) -> None:
        self._parts = [
            make_resumable(one, f"{name} {index}", rank, shard)
            for index, one in enumerate(loader.flattened)
        ]
        self.loader = loader.of([part.loader for part in self._parts])
        self._name, self._rank, self._shard = name, rank, shard
        self._warned = False
        self.left = math.inf
        self.has_exact_length = all(part.has_exact_length for part in self._parts)
        self._resumed: list[int] | None = None
        """Batches of each loader that the next `begin` skips; None to compute them from `done`."""

    def batches_left(self, done: int) -> float:
        """Return the number of batches of the epoch after the first `done`; infinity if unknown."""
        if self.left != math.inf:
            return self.left
        return length_of(self.loader) - done if self.has_exact_length else math.inf

    def begin(self, epoch: int, done: int, length: float = math.inf) -> Begun:
        """Return an iterator over an epoch's batches after the first `done`, and an empty list.

        Args:
            epoch: the number of the epoch.
            done: the number of batches to skip.
            length: the number of batches of the epoch; infinity if unknown.
        """
        skipped, self._resumed = self._resumed or self._split(done), None
        readings, left = [], []
        for index, part in enumerate(self._parts):
            batches, own = length_of(part.loader), skipped[index]
            begin = partial(self._again, part, epoch)
            end = self._end_of(index)
            # One that has just been read to its end notices it with the next batch, when its
            # sampler may draw once more.
            is_over = done > end and self.loader.mode != "max_size_cycle"
            if is_over:
                part.skip_rest()
            # A loader at its start begins when it is needed, as in an uninterrupted run; but
            # parallel loaders begin with the epoch.
            at_start = done == 0 and self.loader.mode != "sequential"
            limit = length if batches == math.inf and self.loader.mode != "sequential" else math.inf
            begins = (own or at_start) and not is_over
            now = part.begin(epoch, own, limit)[0] if begins else None
            readings.append(Reading(begin, now, went_through=done >= end, has_ended=is_over))
            left.append(0 if is_over else part.left if part.left != math.inf else batches - own)
        if any(part.left != math.inf for part in self._parts):
            self.left = total_of(left, self.loader.mode)
        else:
            self.left = math.inf
        combined = self.loader.combine(readings)
        return (batch for batch, _, _ in combined), []

    def _again(self, part: Resumable, epoch: int) -> Iterator[Any]:
        return part.begin(epoch, 0)[0]

    def _lengths(self) -> list[float]:
        return [length_of(part.loader) for part in self._parts]

    def _split(self, done: int) -> list[int]:
        """Return the number of batches that each loader has yielded in its current iteration."""
        lengths, mode = self._lengths(), self.loader.mode
        if mode == "sequential":
            counts = []
            for length in lengths:
                counts.append(int(min(done, length)))
                done -= counts[-1]
            return counts
        if mode == "max_size_cycle":
            # One that was read to its end has yet to begin again.
            own = [done if n == math.inf else int((done - 1) % n) + 1 if n else 0 for n in lengths]
            return own if done else [0 for _ in lengths]
        return [int(min(done, length)) for length in lengths]

    def _end_of(self, index: int) -> float:
        """Return the number of batches of the epoch with which a loader is at its end."""
        lengths = self._lengths()
        return sum(lengths[: index + 1]) if self.loader.mode == "sequential" else lengths[index]

    # -- resuming

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`; see `Resumable.state`."""
        parts = [part.state(within_epoch=within_epoch) for part in self._parts]
        mode, is_known = self.loader.mode, math.inf not in self._lengths()
        if within_epoch and not (is_known or mode == "min_size" or self._warned):
            self._warned = True
            self._warn(
                f"a run that resumes from this checkpoint in the middle of an epoch may differ: a "
                f"loader of {self._name} has no length, and without it the mode {mode!r} cannot "
                "tell how many of its batches were read. Give its dataset a __len__"
            )
        return {"mode": self.loader.mode, "parts": parts}

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Restore the states of all ranks; return the number of batches that are done.

        Args:
            states: the return values of `state`, in the order of the ranks that saved.
            batches: the number of batches that each of these ranks had yielded in the epoch; 0 at
                its start.
        """
        done, count = self._split(batches), self._shard[1]
        saved = {(one.get("shards"), one.get("batch_size")) for one in states[0]["parts"]}
        now = {(count, part.batch_size) for part in self._parts}
        if batches and len(self._parts) > 1 and self.loader.mode != "min_size" and saved != now:
            self._warn(
                f"the checkpoint was saved in the middle of an epoch of {self._name}, with another "
                f"number of readers or other batch sizes. In the mode {self.loader.mode!r}, "
                f"{OVERLAP}: resume with what it was saved with, or from the end of an epoch"
            )
        resumed = [
            part.resume([state["parts"][index] for state in states], done[index])
            for index, part in enumerate(self._parts)
        ]
        if resumed == done:
            return batches
        self._resumed = resumed
        if self.loader.mode == "sequential":
            return sum(resumed)
        return min(resumed) if self.loader.mode == "min_size" else max(resumed)

    def _warn(self, message: str) -> None:
        if self._rank == 0:
            warnings.warn(message, stacklevel=3)

    def close(self) -> None:
        """End persistent workers, after the last iteration."""
        for part in self._parts:
            part.close()
