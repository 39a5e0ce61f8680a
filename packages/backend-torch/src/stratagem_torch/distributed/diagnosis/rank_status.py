"""RankStatuses: the position of each rank, queried after a hang or a lost connection."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from stratagem.errors import CommunicationError, with_explanation
from stratagem.launch import IN_CALLS, line_in_traceback, operation, users_line
from stratagem.system import at_fork
from stratagem_torch.distributed.diagnosis.status_exchange import (
    ANSWER_TIME,
    UNREACHABLE,
    RankStatus,
    StatusExchange,
    Survey,
    by_place,
    ranges,
)

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
        *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "gather_into_tensor", "gather_object", "gather_single", "monitored_barrier"),
        *("recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
        *("scatter", "scatter_object_list", "send", *IN_CALLS),
    )
)
"""Calls in which a rank may wait for others; backward communicates under most strategies."""

_MARK_ATTEMPTS = 3
"""How often a rank tries to report its end, if the store does not answer."""

THE_END = "the end of its script"

_SILENT = f"no answer within {ANSWER_TIME:g} s"

# Python 3.11 reads the frames of all threads under a lock. No fork may happen while the lock is
# taken: a worker of a data loader would wait for it forever.
_reads_frames = threading.Lock()
at_fork(
    before=_reads_frames.acquire,
    after_in_parent=_reads_frames.release,
    after_in_child=_reads_frames.release,
)


class RankStatuses:
    """Shares the status of every rank through the store of the process group.

    A thread on each rank waits for queries, and answers with the position of the main thread, which
    may itself be stuck in a collective.

    Args:
        store: the store of the process group; this object opens a second connection.
        rank, world_size: this rank, and the number of ranks.
        timeout: the timeout of collectives of the group, in seconds; for messages.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.doing: Callable[[], str] = str
        """Returns the current activity of the front end; "" by default."""
        self.within: Callable[[], str] = str
        """Returns the part of a step in which the strategy is; "" by default."""
        self.place: Callable[[Sequence[int]], str] = lambda ranks: ""
        """Returns what ranks have in common in their mesh; see `Ranks.place`."""
        self.exchange = StatusExchange(store, rank, world_size, here=self.here)
        self._main = threading.get_ident()
        self._is_over = False
        self._failing: RankStatus | None = None
        """The position at which this rank failed, while it reports the error."""

    def here(self) -> RankStatus:
        """Return the position of this rank's main thread."""
        if self._failing is not None:
            return self._failing
        if self._is_over:
            return RankStatus(self.rank, THE_END, "")
        with _reads_frames:
            frame = sys._current_frames().get(self._main)
        return self._at(frame)

    def where(self, frame: FrameType | None) -> str:
        """Return the position of a frame of this rank's main thread, as a line of text."""
        return f"{self._at(frame)}\n"

    def _at(self, frame: FrameType | None) -> RankStatus:
        return RankStatus(self.rank, operation(frame), users_line(frame), self._activity())

    def _activity(self) -> str:
        return ", ".join(filter(None, (self.doing(), self.within())))

    # -- asking

    def ask(self) -> Survey:
        """Query the status of every rank; return this rank's status and the answers so far.

        Ranks that do not answer within `ANSWER_TIME` have no answer.
        """
        return self.exchange.ask(self.here(), bool)

    def explain(
        self, error: BaseException, enough: Callable[[], bool] = bool
    ) -> CommunicationError | None:
        """Return an error that names the rank that made a collective fail.

        None: the error does not come from a collective.
        """
        if not is_communication_error(error):
            return None
        with self.failing(error) as own:
            survey = self.exchange.ask(own, enough)
            self.mark("failed")
        return CommunicationError(*self._message(error, own, survey), str(own))

    @contextmanager
    def failing(self, error: BaseException) -> Iterator[RankStatus]:
        """Answer queries with the position at which an error was raised, while it is reported."""
        frames = list(traceback.walk_tb(error.__traceback__))
        innermost = frames[-1][0] if frames else None
        own = RankStatus(
            self.rank, operation(innermost), line_in_traceback(error), self._activity()
        )
        self._failing = own
        try:
            yield own
        finally:
            self._failing = None

    def _message(
        self, error: BaseException, own: RankStatus, survey: Survey
    ) -> tuple[str, tuple[int, ...]]:
        cause = str(error).partition("\n")[0].strip()
        lines = [f"rank {self.rank}: {own.operation} failed at {own.line}: {cause}"]
        if first := survey.error:
            lines.append(f"because rank {first.rank} failed:\n\n{first.failure.rstrip()}\n")
            return "\n".join(lines), (first.rank,)
        silent = [rank for rank in range(self.world_size) if rank not in survey.answers]
        # Rank 0 holds the store. Without the store, the state of the others is unknown.
        known = range(self.world_size if not survey.unknown else survey.unknown == UNREACHABLE)
        missing = tuple(rank for rank in silent if rank in known)
        if missing:
            lines[0] = (
                f"rank(s) {ranges(missing)} missing from {own.operation}, at {own.line} on rank "
                f"{self.rank}: {cause}"
            )
        lines.append("Where the ranks are:")
        lines += [f"  {line}" for line in self.described(survey, silent)]
        if not silent:
            lines.append(
                "Every rank must call the same collectives in the same order and take the same "
                f"number of steps. A rank that needs longer than {self.timeout:g} s between two of "
                "them needs a larger timeout= of the strategy"
            )
        return with_explanation("\n".join(lines), "hang"), missing

    def described(self, survey: Survey, silent: Sequence[int]) -> list[str]:
        """Return the positions of ranks, one line per position.

        Args:
            survey: the answers.
            silent: the ranks without an answer that are listed as well.
        """
        told = {
            f"{self._ranks(ranks)}: {place}": ranks[0]
            for place, ranks in by_place(survey.answers.values()).items()
        }
        ends = {
            "done": ("has ended its script, in order", "have ended their scripts, in order"),
            "failed": ("has failed before, and ended", "have failed before, and ended"),
            "": (
                f"{_SILENT}: it has died, is stopped, or cannot be reached",
                f"{_SILENT}: they have died, are stopped, or cannot be reached",
            ),
        }
        holds = " (it holds the store that the ranks meet at)"
        for how, (of_one, of_several) in ends.items():
            group = [rank for rank in silent if survey.ended.get(rank, "") == how]
            if not how and group[:1] == [0] and survey.unknown in ("", UNREACHABLE):
                told[f"rank 0: {of_one}{holds}"] = group.pop(0)
            if not how and survey.unknown:
                of_one = of_several = f"not known where: {survey.unknown}"
            if group:
                end = of_one if len(group) == 1 else of_several
                told[f"{self._ranks(group)}: {end}"] = group[0]
        return sorted(told, key=lambda line: told[line])

    def _ranks(self, ranks: Sequence[int]) -> str:
        place = self.place(ranks)
        text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"
        return f"{text} ({place})" if place else text

    # -- leaving

    def report_failure(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks, before its connections close."""
        report = "".join(traceback.format_exception(error))
        own = RankStatus(self.rank, "its own error", line_in_traceback(error), failure=report)
        self._failing = replace(own, failure="")
        try:
            self.exchange.report(own)
        except RuntimeError:
            pass  # the store has gone, and with it the ranks that would query
        finally:
            self._failing = None

    def mark_done(self) -> None:
        """Report that this rank's script has ended."""
        self._is_over = True
        for _ in range(_MARK_ATTEMPTS):
            if self.mark("done"):
                return
            time.sleep(1.0)

    def staying(self, what: str = "ended") -> set[int]:
        """Return the other ranks that have not reported the end of their script, or of `what`."""
        others = set(range(self.world_size)) - {self.rank}
        try:
            return others - self.exchange.ended(what).keys()
        except RuntimeError:
            return others

    def mark(self, how: str, what: str = "ended") -> bool:
        """Report the end of this rank's script, or of `what`; return whether it is stored."""
        try:
            self.exchange.mark(how, what)
        except RuntimeError:
            return False  # the store has gone with the rank that held it, or does not answer
        return True

    def leave(self) -> None:
        """End the answering thread: this rank answers no further queries."""
        self.exchange.leave()


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from a collective that other ranks did not complete."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    # gloo raises plain RuntimeErrors.
    return any(
        mark in text
        for mark in (
            "gloo/",
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
            "monitoredBarrier",
        )
    )
