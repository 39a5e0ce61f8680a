"""Stragglers: names a rank for which the others wait."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from stratagem.strategies import Ranks
from stratagem_extras.callbacks.data_wait import DataWait

_STEPS = 5
"""The steps that are measured in a row; their median counts."""
_LEAST = 1e-3
"""Seconds that a rank is slower by, at least."""


class Stragglers:
    """Compares how long each rank works for a step, and names one that is slower.

    The time of a rank is the wait for its batches, the forward pass and the backward pass, without
    the time in which it waits for other ranks. Each rank writes its time to the ranks' store, from
    which rank 0 reads later. So no step waits for the comparison.

    Args:
        ranks: the ranks.
        every: the number of steps between two comparisons.
        factor: the factor above the time of the other ranks from which a rank is slow.

    Attributes:
        values: the last comparison on rank 0, for loggers.

    Raises:
        ConfigurationError: the ranks have no store.
    """

    def __init__(self, ranks: Ranks, every: int, factor: float) -> None:
        self._ranks = ranks
        self._store = ranks.store()
        self._every = max(every, _STEPS + 1)
        self._factor = factor
        self._times: list[float] = []
        self._suspect: int | None = None
        """The rank that the last comparison has found."""
        self._named: set[int] = set()
        self._own: OwnTime | None = None
        """Measures the present step."""
        self._is_watching = False
        self.values: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        """Return whether a step is measured; the first steps are not."""
        return step >= self._every and step % self._every < _STEPS

    def next_due(self, step: int) -> int:
        """Return the first measured step from a step on."""
        return step if self.is_due(step) else (step // self._every + 1) * self._every

    @contextmanager
    def measuring(self, number: int, wait: DataWait, step: Any) -> Iterator[None]:
        """Measure a step.

        Args:
            number: the number of earlier steps.
            wait: the waits for data, of which the last is for this step.
            step: the step.
        """
        if not self._is_watching:
            self._is_watching = True
            step.surround_backward(self._before_backward, self._after_backward)
        before = wait.waited - wait.waited_before
        self._own = own = OwnTime()
        try:
            with own.leaving_out_waits():
                yield
        finally:
            self._own = None
        self._times.append(own.seconds() + before)
        if number % self._every == _STEPS - 1:
            self._publish(number // self._every)

    def _before_backward(self, loss: Tensor) -> None:
        if self._own is not None:
            self._own.watch(loss)

    def _after_backward(self) -> None:
        if self._own is not None:
            self._own.go_on()

    def _publish(self, number: int) -> None:
        """Write this rank's time to the store."""
        time, self._times = median(self._times), []
        data = [number, time, self._ranks.node_rank, socket.gethostname()]
        self._store.set(self._key(self._ranks.global_rank, number), json.dumps(data))

    def _key(self, rank: int, number: int) -> str:
        # Two keys in turns: a rank may write the next time before rank 0 has read this one.
        return f"stragglers/{rank}/{number % 2}"

    def compare(self, step: int) -> str:
        """Compare the times that ranks wrote last; return a sentence about a slow rank, or "".

        Called on rank 0 before each measured step; it compares before the first one of a row.
        """
        number = step // self._every - 1
        if step % self._every:
            return ""
        keys = [self._key(rank, number) for rank in range(self._ranks.world_size)]
        if number < 1 or not self._store.check(keys):
            return ""
        found = [Measured(*json.loads(self._store.get(key))) for key in keys]
        if any(one.number != number for one in found):
            return ""
        slow, other = slowest([one.time for one in found])
        self.values = {
            "goodput/slowest_rank": slow,
            "goodput/slowest_rank_over_others": found[slow].time / max(other, 1e-9),
        }
        is_slow = found[slow].time > max(self._factor * other, other + _LEAST)
        suspect, self._suspect = self._suspect, slow if is_slow else None
        # Twice in a row: one comparison may be disturbed by chance.
        if not is_slow or suspect != slow or slow in self._named:
            return ""
        self._named.add(slow)
        place = self._ranks.place([slow])
        where = f"node {found[slow].node} {found[slow].host!r}" + (f", {place}" if place else "")
        return (
            f"rank {slow} ({where}) takes {found[slow].time / other:.1f} times as long as the "
            f"other ranks to read a batch and to run forward and backward: "
            f"{1000 * found[slow].time:.1f} ms beside {1000 * other:.1f} ms in the steps before "
            f"step {step}; the other ranks wait for it"
        )


@dataclass
class Measured:
    """The time of a rank in a comparison, with its node."""

    number: int
    time: float
    node: int
    host: str


def slowest(times: Sequence[float]) -> tuple[int, float]:
    """Return the rank of the longest time, and the median of the others.

    Example:
        >>> slowest([1.0, 3.0, 1.5, 1.0])
        (1, 1.0)
    """
    rank = max(range(len(times)), key=times.__getitem__)
    return rank, median([*times[:rank], *times[rank + 1 :]])


class OwnTime:
    """The time of a step without waits for other ranks.

    The end of a backward pass on this rank is known before DDP waits for gradients: functions at
    the end of a backward pass are called in the order in which they were added, and this one's is
    added first. Waits for other collectives are measured where Python waits for them.
    """

    def __init__(self) -> None:
        self._began: float | None = perf_counter()
        """The begin of the time that counts; None: no time counts now."""
        self._own = self._waited = 0.0
        self._has_ended = False

    def watch(self, loss: Tensor) -> None:
        """Watch the backward pass of a loss."""
        if loss.requires_grad:
            loss.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._began is not None:
            self._own += perf_counter() - self._began - self._waited
            self._began, self._has_ended = None, True

    def go_on(self) -> None:
        """Count the time of the next micro-batch."""
        self._began, self._waited = perf_counter(), 0.0

    def seconds(self) -> float:
        """Return the seconds until the end of the last backward pass."""
        if not self._has_ended:
            self._end()
        return max(0.0, self._own)

    @contextmanager
    def leaving_out_waits(self) -> Iterator[None]:
        """Leave out the waits for collectives in a context."""
        wait = dist.Work.wait

        def timed(work: Any, *args: Any, **options: Any) -> Any:
            began = perf_counter()
            try:
                return wait(work, *args, **options)
            finally:
                self._waited += perf_counter() - began

        dist.Work.wait = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
