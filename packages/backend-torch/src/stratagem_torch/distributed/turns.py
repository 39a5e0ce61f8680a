"""EvaluationTurns: which ranks have a batch in each step of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from typing import Any, Protocol

from stratagem.errors import CommunicationError, UserCodeError
from stratagem.strategies import PreparedModel, Ranks, Strategy, context_of

_END: Any = object()


class EvaluationLoader(Protocol):
    """A loader of this rank, as the Trainer opens it."""

    @property
    def name(self) -> str:
        """The loader's name in errors."""

    @property
    def batches(self) -> float:
        """The number of batches to run; infinity: all batches, whose number is unknown."""

    @property
    def is_counted(self) -> bool:
        """Whether the number of batches is exact."""

    def no_batch_error(self) -> UserCodeError:
        """Return the error of a loader without batches."""


class EvaluationTurns:
    """Yields this rank's batches, and keeps together the ranks that have one.

    1. At the start, all ranks exchange their numbers of batches, once.
    2. While all ranks have a batch, each reads its own.
    3. From then on, collectives run among the ranks that have a batch (`Ranks.among`). The first of
       these ranks leads the others through the communication of its forward passes, if the strategy
       needs that.
    4. Ranks with fewer batches wait for the end of the loader (`Ranks.meet`).

    If a rank cannot tell its number of batches, the ranks agree on 2 and 3 before each step.

    Args:
        strategy: the strategy.
        prepared: the prepared model.
        loaders: the loaders of this rank.
        step: the name of the step, for errors.

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.strategies import EvaluationTurns
        >>> lite = Lite(accelerator="cpu")
        >>> EvaluationTurns(lite.strategy, None, [], "validation_step").follows
        False
    """

    def __init__(
        self,
        strategy: Strategy,
        prepared: PreparedModel,
        loaders: Sequence[EvaluationLoader],
        step: str,
    ) -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._ranks = strategy.ranks
        self._step = step
        self._counts = [n if min(n) >= 0 else None for n in _exchanged(loaders, self._ranks)]
        can = strategy.capabilities
        self.follows = not can.allows_uneven_eval and strategy.follows_evaluation
        self._needs_equal = not can.allows_uneven_eval and not strategy.follows_evaluation
        self._channels: list[Channel] = []
        """The channels of steps that this rank has led."""

    def batches(
        self, index: int, loader: EvaluationLoader, batches: Iterator[Any]
    ) -> Generator[Any, None, None]:
        """Yield this rank's batches of a loader.

        The collectives between two batches run among the ranks that have the first one.

        Args:
            index: the loader's index.
            loader: the loader.
            batches: its batches.

        Raises:
            UserCodeError: no rank has a batch, or the strategy needs one on each rank.
        """
        limit = None if math.isinf(loader.batches) else int(loader.batches)
        batches = islice(batches, limit)
        counts = self._counts[index]
        if counts is None:
            yield from self._agreed(batches, loader)
        else:
            yield from self._counted(batches, counts, loader)

    def _counted(
        self, batches: Iterator[Any], counts: Sequence[int], loader: EvaluationLoader
    ) -> Iterator[Any]:
        """Yield the batches of a loader whose numbers all ranks know."""
        fewest, most = min(counts), max(counts)
        if fewest == most:
            yield from batches
            return
        self._check_may_differ(loader, counts)
        turns = [_ranks_with(count > step for count in counts) for step in range(fewest, most)]
        for members in dict.fromkeys(turns):
            self._ranks.connect(members)
        yield from islice(batches, fewest)
        with self._meeting():
            for members in turns:
                yield from self._turn(batches, members)

    def _agreed(self, batches: Iterator[Any], loader: EvaluationLoader) -> Iterator[Any]:
        """Yield the batches of a loader of unknown length; ranks agree before each step."""
        rank, world_size = self._ranks.global_rank, self._ranks.world_size
        for step in count():
            batch = next(batches, _END)
            own = [batch is not _END and each == rank for each in range(world_size)]
            members = _ranks_with(self._ranks.all_reduce_ints(own, "sum"))
            if not members:
                break
            if len(members) == world_size:
                yield batch
                continue
            self._check_may_differ(loader, [step + (each in members) for each in range(world_size)])
            self._ranks.connect(members)
            with self._meeting():
                yield from self._turn(iter((batch,)), members)
        if step == 0 and loader.batches != 0:
            raise loader.no_batch_error()

    def _turn(self, batches: Iterator[Any], members: tuple[int, ...]) -> Iterator[Any]:
        """Yield the next batch to the members; the other ranks follow, if the strategy needs it."""
        channel = Channel(self._ranks, members[0]) if self.follows else None
        if self._ranks.global_rank in members:
            with ExitStack() as stack:
                stack.enter_context(self._ranks.among(members))
                if channel is not None and self._ranks.global_rank == members[0]:
                    self._channels.append(channel)
                    announce = stack.enter_context(channel.leading())
                    lead = self._strategy.lead_evaluation_step
                    stack.enter_context(context_of(lead, self._prepared, announce))
                yield from islice(batches, 1)
        elif channel is not None:
            self._strategy.follow_evaluation_step(
                self._prepared, channel.announced(f"{self._step} of rank {members[0]}")
            )

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """At the end, wait for the ranks that have batches left; if this one fails, tell them."""
        did = f"has no batch left for {self._step}"
        try:
            yield
        except BaseException:
            self._ranks.meet(did, failed=True)
            raise
        self._ranks.meet(did)
        for channel in self._channels:
            channel.clear()
        self._channels.clear()

    def _check_may_differ(self, loader: EvaluationLoader, counts: Sequence[int]) -> None:
        if self._needs_equal:
            raise UserCodeError(
                f"{loader.name} has different numbers of batches on the ranks: "
                + ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(counts))
                + f". {type(self._strategy).__name__} communicates in each forward pass, so that "
                "all ranks need as many: let each rank's data have as many batches, or limit them "
                "to the fewest"
            )


def _exchanged(loaders: Sequence[EvaluationLoader], ranks: Ranks) -> list[list[int]]:
    """Return each rank's number of batches of each loader; -1 if a rank does not know it."""
    own = [int(one.batches) if one.is_counted else -1 for one in loaders]
    world_size, rank = ranks.world_size, ranks.global_rank
    if not loaders:
        return []
    # One row for each rank, and zeros in the others' rows.
    before, after = [0] * (rank * len(own)), [0] * ((world_size - rank - 1) * len(own))
    numbers = ranks.all_reduce_ints([*before, *own, *after], "sum")
    return [numbers[index :: len(own)] for index in range(len(own))]


def _ranks_with(values: Any) -> tuple[int, ...]:
    return tuple(rank for rank, value in enumerate(values) if value)


_ENDED, _FAILED = -1, -2
_channels = count()
"""Numbers the steps that are followed; the same on all ranks of this process's group."""


class Channel:
    """Carries the numbers that a leading rank announces to the ranks that follow its step.

    The numbers are entries of the store of the ranks, since a process group could mix them with the
    collectives of the step.

    Args:
        ranks: the ranks.
        leader: the rank that announces.
    """

    def __init__(self, ranks: Ranks, leader: int) -> None:
        self._store = ranks.store()
        self._prefix = f"evaluation/{next(_channels)}"
        self._leader = leader
        self._announced = 0

    @contextmanager
    def leading(self) -> Iterator[Callable[[int], None]]:
        """Yield the function that announces a number; at the end, tell the others of it."""

        def announce(number: int) -> None:
            self._store.set(f"{self._prefix}/{self._announced}", str(number))
            self._announced += 1

        try:
            yield announce
        except BaseException:
            announce(_FAILED)
            raise
        announce(_ENDED)

    def announced(self, step: str) -> Iterator[int]:
        """Yield the numbers in the order of their announcement.

        Args:
            step: the name of the followed step, for the error.

        Raises:
            CommunicationError: the step has failed.
        """
        for index in count():
            number = int(self._store.get(f"{self._prefix}/{index}"))
            if number == _ENDED:
                return
            if number == _FAILED:
                raise CommunicationError(
                    f"{step}, which this rank follows without a batch, has failed", (self._leader,)
                )
            yield number

    def clear(self) -> None:
        """Delete the numbers, which all ranks have read."""
        for index in range(self._announced):
            self._store.delete_key(f"{self._prefix}/{index}")
