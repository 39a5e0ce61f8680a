"""Combined loaders that resume in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stratagem.checkpoint.forms import require_form
from stratagem.data.combined_loader import CombinedLoader, Reading, total_of
from stratagem.data.resume import make_resumable
from stratagem.data.resume.resumable import Begun, Resumable
from stratagem.data.sharding import length_of

_FORM = {"mode?": str, "parts": [object], "readings?": [{"starts": [int], "ends": [int]}]}

_MOST = 1000
"""The newest positions of a short loader that begins again and again; a few are read in advance."""


@dataclass(frozen=True)
class _Position:
    """The position of a loader in an epoch.

    Attributes:
        read: the number of batches that it has yielded in its current iteration, or in its last.
        has_begun: whether it has begun an iteration.
        went_through: whether its end was noticed in this epoch.
        is_over: whether it is at its end, and yields no further batch in this epoch.
    """

    read: int = 0
    has_begun: bool = False
    went_through: bool = False
    is_over: bool = False

    @classmethod
    def from_state(cls, reading: Mapping[str, list[int]], done: int, mode: str) -> _Position:
        """Return the position after the first `done` batches of the CombinedLoader.

        The state may be of a later position, since batches are read in advance.
        """
        starts = [start for start in reading["starts"] if start < done]
        ends = [end for end in reading["ends"] if end < done]
        if not starts:
            return cls()
        is_over = bool(ends) and mode != "max_size_cycle"
        return cls((ends[-1] if is_over else done) - starts[-1], True, bool(ends), is_over)

    @classmethod
    def from_length(cls, length: float, done: int, before: float, mode: str) -> _Position:
        """Return the position of a loader of known length, for checkpoints without positions.

        Args:
            length: the number of its batches.
            done: the number of batches of the CombinedLoader.
            before: the number of batches of earlier loaders, in the mode "sequential".
            mode: the mode of the CombinedLoader.
        """
        read = max(0, done - before)
        if mode == "max_size_cycle" and 0 < length < read:
            return cls(int((read - 1) % length) + 1, True, went_through=True)
        return cls(int(min(read, length)), read > 0, read > length, read > length)


class CombinedResumable:
    """Iterates over a CombinedLoader from any batch of an epoch on; see `Resumable`.

    Each loader resumes separately, after the batches that it had yielded.

    Args:
        loader: the loader of this rank.
        name, rank, shard: as for `Resumable`.
        is_numbered: yield `(batch, batch_idx, dataloader_idx)`, and not the batch alone.

    Attributes:
        loader: the loader to iterate over.
        left: the remaining batches of the epoch, if the rest was resharded to other ranks.
        has_exact_length: whether each loader yields exactly `len(loader)` batches.
    """

    batch_size = 1

    def __init__(
        self,
        loader: CombinedLoader,
        name: str,
        rank: int,
        shard: tuple[int, int],
        *,
        is_numbered: bool = False,
    ) -> None:
        self._parts = [
            make_resumable(one, f"{name} {index}", rank, shard)
            for index, one in enumerate(loader.flattened)
        ]
        self.loader = loader.of([part.loader for part in self._parts])
        self.left = math.inf
        self.has_exact_length = all(part.has_exact_length for part in self._parts)
        self._name = name
        self._is_numbered = is_numbered
        self._resumed: list[_Position] | None = None
        """The position of each loader from which the next `begin` resumes."""
        self._is_resharded = False
        """Whether the next `begin` resumes with other numbers of batches."""
        self._readings: list[Reading] = []

    def batches_left(self, done: int) -> float:
        """Return the number of batches of the epoch after the first `done`; infinity if unknown."""
        if self.left != math.inf:
            return self.left
        return length_of(self.loader) - done if self.has_exact_length else math.inf

    def end_of_epoch(self) -> None:
        """Return None: the numbers of samples are not known; see `Resumable`."""

    def begin(self, epoch: int, done: int, length: float = math.inf) -> Begun:
        """Return an iterator over an epoch's batches after the first `done`, and an empty list.

        Args:
            epoch: the number of the epoch.
            done: the number of batches to skip.
            length: the number of batches of the epoch; infinity if unknown.
        """
        positions, self._resumed = self._resumed or self._positions(done), None
        self._readings, left = [], []
        for part, position in zip(self._parts, positions, strict=True):
            batches = length_of(part.loader)
            begin = partial(self._again, part, epoch)
            if position.is_over:
                part.skip_rest()
            # A loader at its start begins when it is needed, as in an uninterrupted run; but
            # parallel loaders begin with the epoch.
            is_parallel = self.loader.mode != "sequential"
            limit = length if batches == math.inf and is_parallel else math.inf
            begins = not position.is_over and (position.has_begun or (done == 0 and is_parallel))
            now = part.begin(epoch, position.read, limit)[0] if begins else None
            # The positions before `done` that give this one again.
            end = done - 1 if position.is_over else done
            starts = [end - position.read] if position.has_begun else []
            ends = [] if not position.went_through else [end if position.is_over else -1]
            self._readings.append(
                Reading(begin, now, starts=starts, ends=ends, has_ended=position.is_over)
            )
            rest = part.left if part.left != math.inf else max(0, batches - position.read)
            left.append(0 if position.went_through else rest)
        is_resharded = self._is_resharded or any(part.left != math.inf for part in self._parts)
        self.left = total_of(left, self.loader.mode) if is_resharded else math.inf
        self._is_resharded = False
        combined = self.loader.combine(self._readings, done)
        return combined if self._is_numbered else (batch for batch, _, _ in combined), []

    def _again(self, part: Resumable, epoch: int) -> Iterator[Any]:
        return part.begin(epoch, 0)[0]

    def _positions(self, done: int) -> list[_Position]:
        """Return the position of each loader, by their lengths."""
        positions, before, mode = [], 0.0, self.loader.mode
        for part in self._parts:
            length = length_of(part.loader)
            positions.append(_Position.from_length(length, done, before, mode))
            before += length if mode == "sequential" else 0
        return positions

    # -- resuming

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`; see `Resumable.state`."""
        parts = [part.state(within_epoch=within_epoch) for part in self._parts]
        readings = [
            {"starts": one.starts[-_MOST:], "ends": one.ends[:1] + one.ends[-_MOST:]}
            for one in self._readings
        ]
        return {"mode": self.loader.mode, "parts": parts, "readings": readings}

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Restore the states of all ranks; return the number of batches that are done.

        Args:
            states: the return values of `state`, in the order of the ranks that saved.
            batches: the number of batches that each of these ranks had yielded in the epoch; 0 at
                its start.
        """
        first, mode = require_form(states[0], _FORM, f"position in {self._name}"), self.loader.mode
        readings = first.get("readings") or []
        saved = [_Position.from_state(one, batches, mode) for one in readings]
        if len(saved) != len(self._parts):
            saved = self._positions(batches)
        read = [
            part.resume([state["parts"][index] for state in states], saved[index].read)
            for index, part in enumerate(self._parts)
        ]
        self._resumed = [replace(one, read=n) for one, n in zip(saved, read, strict=True)]
        if read == [one.read for one in saved]:
            return batches
        self._is_resharded = True
        if mode == "sequential":
            return sum(read)
        return min(read) if mode == "min_size" else max(read)

    def close(self) -> None:
        """End persistent workers, after the last iteration."""
        for part in self._parts:
            part.close()
