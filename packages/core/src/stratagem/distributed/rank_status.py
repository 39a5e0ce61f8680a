"""RankStatuses: where each rank is, asked for when something hangs or a connection is lost."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stratagem.distributed.bounded_store import BoundedStore
from stratagem.errors import CommunicationError

_LOOK = 0.5
"""Seconds between two looks of the answering thread: one round trip to the store each, 0.1 ms."""
_ANSWER_TIME = 4.0
"""Seconds that the others have to answer."""

_MARK_ATTEMPTS = 3
"""How often a rank says that it has left, where the store does not answer for a while."""
COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
        *("all_to_all_single", "backward", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "monitored_barrier", "recv", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "send"),
    )
)
"""What a rank may be in when it waits for others; backward communicates under most strategies."""

THE_END = "the end of its script"

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<frozen",
)


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is.

    Attributes:
        rank: which one.
        operation: the call that it is in, such as "all_reduce" or "backward".
        line: the user's line that led there, "train.py:31 in training_step".
        doing: what the front end says, such as "fit, epoch 0, step 12"; "" if nothing.
        failure: its traceback, if it has failed.
    """

    rank: int
    operation: str
    line: str
    doing: str = ""
    failure: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank}: at {self.operation}"
        if self.line:
            text = f"rank {self.rank}: in {self.operation}, at {self.line}"
        return f"{text} ({self.doing})" if self.doing else text


class RankStatuses:
    """Shares the status of every rank through the store of the process group.

    A thread on each rank looks twice a second whether somebody asks, and answers with the stack of
    the main thread, which may itself be stuck in a collective.

    Args:
        store: of the process group; a connection of its own is made.
        rank, world_size: this rank, and how many there are.
        timeout: of the group's collectives, in seconds; for messages.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.doing: Callable[[], str] = str
        """What the front end is doing; "" by default."""
        # The store serves one request of a connection at a time: the main thread may be waiting.
        own = store.clone()
        own.set_timeout(timedelta(seconds=_ANSWER_TIME))
        prefixed = dist.PrefixStore("stratagem_status", own)  # type: ignore[attr-defined]
        self._store = BoundedStore(prefixed, seconds=_ANSWER_TIME)
        self._lock = threading.Lock()
        self._round = 0
        self._main = threading.get_ident()
        self._left = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(
            target=self._answer_questions, name="stratagem-statuses", daemon=True
        )
        if world_size > 1:
            self._thread.start()

    # -- answering

    def _answer_questions(self) -> None:
        while not self._left.wait(_LOOK):
            try:
                with self._lock:
                    asked = self._store.check([f"ask/{self._round}"])
                if asked:
                    self._tell(self.here())
                    self._round += 1
            except RuntimeError:
                pass  # the rank that holds the store has gone, or does not answer for now

    def _tell(self, position: RankStatus) -> None:
        key = f"at/{self._round}/{self.rank}"
        with self._lock:
            # Whoever asks, or has failed, has reported it better.
            if not self._store.check([key]):
                self._store.set(key, json.dumps(asdict(position)))

    def here(self) -> RankStatus:
        """Return where this rank's main thread is."""
        if self._is_over:
            return RankStatus(self.rank, THE_END, "")
        frame = sys._current_frames().get(self._main)
        return RankStatus(self.rank, _operation(frame), _users_line(frame), self.doing())

    # -- asking

    def ask(
        self, own: RankStatus | None = None, enough: Callable[[], bool] = bool
    ) -> dict[int, RankStatus]:
        """Ask every rank; return the answers that come in time, with this rank's own.

        Args:
            own: this rank's answer; None: where its main thread is.
            enough: whether no more answers are needed.
        """
        mine = self.here() if own is None else own
        answers = {self.rank: mine}
        try:
            current = self._round
            with self._lock:
                self._store.set(f"at/{current}/{self.rank}", json.dumps(asdict(mine)))
                self._store.set(f"ask/{current}", "")
            deadline = time.monotonic() + _ANSWER_TIME
            while len(answers) < self.world_size and time.monotonic() < deadline and not enough():
                for rank in range(self.world_size):
                    if rank not in answers and (position := self._read(current, rank)):
                        answers[rank] = position
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store is gone or cannot be reached: what is missing says it
        return answers

    def _read(self, current: int, rank: int) -> RankStatus | None:
        key = f"at/{current}/{rank}"
        with self._lock:
            if not self._store.check([key]):
                return None
            return RankStatus(**json.loads(self._store.get(key)))

    def explain(
        self, error: BaseException, enough: Callable[[], bool] = bool
    ) -> CommunicationError | None:
        """Return an error that names the rank behind a failed collective; None for other errors."""
        if not is_communication_error(error):
            return None
        frames = list(traceback.walk_tb(error.__traceback__))
        innermost = frames[-1][0] if frames else None
        own = RankStatus(self.rank, _operation(innermost), _line_in_traceback(error), self.doing())
        better = CommunicationError(*self._described(error, self.ask(own, enough)), str(own))
        self._mark("failed")
        return better

    def _described(
        self, error: BaseException, answers: Mapping[int, RankStatus]
    ) -> tuple[str, tuple[int, ...]]:
        own = answers[self.rank]
        missing = tuple(r for r in range(self.world_size) if r not in answers)
        failed = [p for p in answers.values() if p.failure]
        cause = str(error).partition("\n")[0].strip()
        lines = [f"rank {self.rank}: {own.operation} failed at {own.line}: {cause}"]
        if failed:
            first = failed[0]
            lines.append(f"because rank {first.rank} failed:\n\n{first.failure.rstrip()}\n")
            return "\n".join(lines), (first.rank,)
        if missing:
            who = ", ".join(map(str, missing))
            lines[0] = (
                f"rank(s) {who} missing from {own.operation}, at {own.line} on rank {self.rank}: "
                f"{cause}"
            )
        lines.append("Where the ranks are:")
        for rank in range(self.world_size):
            if rank in answers:
                lines.append(f"  {answers[rank]}")
            elif self._is_marked("left", rank):
                lines.append(f"  rank {rank}: has ended its script, in order")
            else:
                lines.append(
                    f"  rank {rank}: no answer within {_ANSWER_TIME:g} s: it has died, is stopped, "
                    "or cannot be reached"
                    + (" (it holds the store that the ranks meet at)" if rank == 0 else "")
                )
        if not missing:
            lines.append(
                "Every rank must call the same collectives in the same order and take the same "
                f"number of steps. A rank that needs longer than {self.timeout:g} s between two of "
                "them needs a larger timeout= of the strategy"
            )
        return "\n".join(lines), missing

    # -- leaving

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks what this one failed with, before its connections close."""
        report = "".join(traceback.format_exception(error))
        own = RankStatus(self.rank, "its own error", _line_in_traceback(error), failure=report)
        try:
            current = self._round
            with self._lock:
                self._store.set(f"at/{current}/{self.rank}", json.dumps(asdict(own)))
        except RuntimeError:
            return
        self._mark("failed")

    def leave(self) -> None:
        """End the answering thread; nobody is answered from here on."""
        self._left.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_TIME + _LOOK)

    def mark_done(self) -> None:
        """Tell that this rank's script is over."""
        self._is_over = True
        for _ in range(_MARK_ATTEMPTS):
            if self._mark("left"):
                return
            time.sleep(1.0)

    def is_done(self, rank: int) -> bool:
        """Whether a rank's script is over, in order or not."""
        return self._is_marked("left", rank) or self._is_marked("failed", rank)

    def _mark(self, how: str) -> bool:
        try:
            with self._lock:
                self._store.set(f"{how}/{self.rank}", "")
        except RuntimeError:
            return False  # the store has gone with the rank that held it, or does not answer
        return True

    def _is_marked(self, how: str, rank: int) -> bool:
        try:
            with self._lock:
                return bool(self._store.check([f"{how}/{rank}"]))
        except RuntimeError:
            return False


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


def _operation(frame: FrameType | None) -> str:
    """Return the collective, or else the call of torch or of this library, that a stack is in."""
    fallback = ""
    innermost = frame
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(("distributed_c10d.py", "_functional_collectives.py")):
            # wrapper is a decorator's; the public function lies around it
            if not name.startswith("_") and name != "wrapper":
                return name
        elif name == "backward" and file.startswith(_LIBRARIES[0]):
            return "backward"
        elif not fallback and file.startswith(_LIBRARIES[:2]) and not name.startswith("_"):
            fallback = name
        frame = frame.f_back
    if innermost is not None and not innermost.f_code.co_filename.startswith(_LIBRARIES):
        return f"{innermost.f_code.co_name}()"
    return fallback or "a call of a library"


def _users_line(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that belongs to no library."""
    outside = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            here = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            # What multiprocessing runs a spawned process by is called <string>, as is `python -c`.
            if "site-packages" not in file and file != "<string>":
                return here
            outside = outside or here
        frame = frame.f_back
    return outside or "a line that is not known"


def _line_in_traceback(error: BaseException) -> str:
    """Return the innermost line of a traceback, or of its callers, that belongs to no library."""
    found = None
    outermost = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        outermost = outermost or frame
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f"{file}:{number} in {frame.f_code.co_name}"
    if found is not None:
        return found
    return _users_line(outermost)
