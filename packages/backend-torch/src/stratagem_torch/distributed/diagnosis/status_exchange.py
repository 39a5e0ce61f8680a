"""StatusExchange: ranks exchange their positions through the store, with O(ranks) requests."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stratagem.errors import format_text
from stratagem_torch.distributed.socket_store import prefixed

_Answers = queue.SimpleQueue[tuple[Any, Exception | None]]
_Call = tuple[Callable[..., Any], tuple[Any, ...], _Answers]


class BoundedStore:
    """Makes each call to a store end in time.

    The timeout of a store limits the time that it waits for a key. It does not limit the time that
    a client waits for an answer over a dead connection, for example after a cable is pulled. A rank
    that reports its failure would then hang.

    Args:
        store: the store; its calls are made in one thread, which the first call starts.
        seconds: how long a call may take.

    Raises:
        RuntimeError: a call takes longer, an earlier call is still unanswered, or the store is
            closed.

    Example:
        >>> import torch.distributed as dist
        >>> store = BoundedStore(dist.HashStore(), seconds=4)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
        >>> store.close()
    """

    def __init__(self, store: Any, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = threading.Lock()
        """Held during a call, also after its caller has stopped waiting."""
        self._is_late = False
        """Whether the caller has stopped waiting."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several keys by one request."""
        self._call("multi_set", list(keys), list(values))

    def append(self, key: str, value: str) -> None:
        """Add text to the end of a key's value, which is "" at first."""
        self._call("append", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return the sum."""
        return int(self._call("add", key, amount))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return bytes(self._call("get", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys with a single request."""
        return list(self._call("multi_get", list(keys)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._call("check", keys))

    def close(self) -> None:
        """Release the store; an unfinished call ends by itself."""
        self._store = None
        self._calls.put(None)

    def _call(self, name: str, *args: Any) -> Any:
        if self._store is None:
            raise RuntimeError("the store has been closed")
        end = time.monotonic() + self._seconds
        # Another thread may call at the same time: its call is answered first.
        if not self._waiting.acquire(timeout=0 if self._is_late else self._seconds):
            raise RuntimeError("the store has not answered an earlier call yet")
        self._is_late = False
        if self._thread is None:
            # A daemon: a call may never end, and must not keep the process.
            self._thread = threading.Thread(
                target=_make_calls,
                args=(self._calls, self._waiting),
                name="stratagem-store",
                daemon=True,
            )
            self._thread.start()
        answers: _Answers = queue.SimpleQueue()
        self._calls.put((getattr(self._store, name), args, answers))
        try:
            value, error = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            self._is_late = True
            raise RuntimeError(f"the store has not answered within {self._seconds} s") from None
        if error is not None:
            raise error
        return value


def _make_calls(calls: queue.SimpleQueue[_Call | None], waiting: threading.Lock) -> None:
    """Make the calls of one store, one after another, until it is closed."""
    while (call := calls.get()) is not None:
        function, args, answers = call
        try:
            result: tuple[Any, Exception | None] = function(*args), None
        except Exception as error:
            result = None, error
        # Drop the reference to the store. The caller may call again once it has the answer.
        del call, function
        waiting.release()
        answers.put(result)
        del result


ANSWER_TIME = 4.0
"""Seconds within which other ranks must answer, and the most that a call to the store may take."""

_LOOK = 0.05
"""Seconds between two polls of the collecting rank; each poll sends a few requests."""
_SPREAD_TIME = 1.0
"""Seconds within which the summary must reach the waiting ranks."""
_ATTEMPTS = 2
"""How many ranks try to collect, one after another: the first may be killed meanwhile."""
_WAIT = timedelta(days=20)
"""How long a connection waits for a message. The limit is near torch's maximum, because torch
prints a warning at each timeout."""
_AT_ONCE = 256
"""Values in one request: a store accepts 8 MB."""
_LONGEST = 20_000
"""The last characters of a traceback that are kept, because every rank may read it."""
_MOST_PLACES = 64
"""Positions in a summary; ranks elsewhere are listed without their position."""

_STOPPED = "another rank has failed meanwhile"
_NOT_COLLECTED = "no rank has collected the answers in time"
UNREACHABLE = "the store that the ranks meet at does not answer"
"""Reasons why the state of other ranks is unknown."""


@dataclass(frozen=True)
class RankStatus:
    """The position of a rank.

    Attributes:
        rank: the rank.
        operation: the rank's current call, such as "all_reduce" or "backward".
        line: the line of the user's code that made the call, "train.py:31 in training_step".
        doing: the front end's activity, such as "fit, epoch 0, step 12"; "": unknown.
        failure: the rank's traceback; "": the rank has not failed.
    """

    rank: int
    operation: str
    line: str
    doing: str = ""
    failure: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.place}"

    @property
    def place(self) -> str:
        """The position as text, without the rank."""
        text = f"in {self.operation}, at {self.line}" if self.line else f"at {self.operation}"
        return f"{text} ({self.doing})" if self.doing else text


@dataclass(frozen=True)
class Survey:
    """The answers of ranks to a query.

    Attributes:
        answers: the status of each rank that answered, in the order of ranks.
        ended: "done" or "failed" for each rank at the end of its script.
        error: the status of the first rank that failed by itself, with its traceback; None: no rank
            has reported an error.
        unknown: the reason why the state of the other ranks is unknown; "" if they were queried and
            had time to answer.
    """

    answers: Mapping[int, RankStatus]
    ended: Mapping[int, str] = field(default_factory=dict)
    error: RankStatus | None = None
    unknown: str = ""


class StatusExchange:
    """Queries the status of all ranks, and answers such queries, through the process group's store.

    1. A thread of each rank waits for the rank's next message (`listen`). The store replies only
       when a message exists, so that waiting causes no traffic.
    2. The first rank that asks sends a message to all ranks, with one request.
    3. Each rank writes its answer, and adds its number to a shared list: two requests.
    4. The first rank reads the complete list, then reads the answers and writes a summary. A second
       message tells all ranks to read the summary. Other ranks that have asked meanwhile wait for
       the summary.

    A connection serves one request at a time, so that the waiting thread blocks its connection. The
    process group uses its own connection at any time, whenever it makes communicators. Each rank
    therefore has two: it asks and reports over the group's connection, and waits on the other.

    Args:
        store: the store of the process group; this object opens a second connection for waiting.
        rank, world_size: this rank, and the number of ranks.
        here: returns this rank's status; called in the waiting thread.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, here: Callable[[], RankStatus]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._here = here
        prefix = "stratagem_status"
        self._store = BoundedStore(prefixed(store, prefix), seconds=ANSWER_TIME)
        self._waiting = prefixed(store.clone(), prefix)
        self._messages = 0
        """Number of messages received by this rank: a question, then its summary, and so on."""
        self._answered = -1
        """The latest question that this rank has answered."""
        self.summary = b""
        """The encoded summary of the latest question of any rank."""
        self._summarised, self._summarised_at = -1, -math.inf
        """The number of that question, and when its summary came, by `time.monotonic`."""
        self._is_new = threading.Condition()
        """Guards the fields above; notified of each summary."""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stratagem-status", daemon=True)

    # -- the thread that waits

    def listen(self) -> None:
        """Start the thread that answers queries."""
        self._thread.start()

    def _listen(self) -> None:
        while not self._left.is_set():
            try:
                self._waiting.wait([self._message(self._rank, self._messages)], _WAIT)
                if not self._left.is_set():
                    self.receive(self._waiting)
            except dist.DistStoreError:
                continue  # a timeout without a message
            except RuntimeError:
                return  # the process that held the store has ended

    def receive(self, store: Any) -> None:
        """Process the next message, which must have arrived: answer it, or read the summary.

        Args:
            store: the connection for the answer.
        """
        question, is_answered = divmod(self._messages, 2)
        self._messages += 1
        if not is_answered:
            self._answer(store, question, self._here(), is_better=False)
            return
        summary = store.get(f"summary/{question}")
        with self._is_new:
            self.summary, self._summarised = summary, question
            self._summarised_at = time.monotonic()
            self._is_new.notify_all()

    def _answer(self, store: Any, question: int, status: RankStatus, *, is_better: bool) -> None:
        with self._is_new:
            is_first = self._answered < question
            self._answered = max(self._answered, question)
        if is_first or is_better:
            store.set(f"answer/{question}/{self._rank}", json.dumps(asdict(status)))
        if is_first:
            store.append(f"answered/{question}", f"{self._rank},")

    def _message(self, rank: int, number: int) -> str:
        # Each rank has a key of its own, so that it can end its own wait.
        return f"message/{rank}/{number}"

    # -- asking

    def ask(self, own: RankStatus, enough: Callable[[], bool]) -> Survey:
        """Query the status of every rank; if another rank has just asked, return its answers.

        Args:
            own: this rank's status.
            enough: returns whether to stop waiting for answers.
        """
        unknown = _NOT_COLLECTED
        try:
            if (recent := self._recent_summary()) is None:
                question = self._store.add("question", 0)
                if question - 1 > self._summarised:  # the latest summary is on its way
                    recent = _decode(self._store.get(f"summary/{question - 1}"))
            if recent is not None:
                error = recent.error or self._first_error()
                return replace(recent, answers={**recent.answers, self._rank: own}, error=error)
            self._answer(self._store, question, own, is_better=True)
            for attempt in range(_ATTEMPTS):
                is_first = self._store.add(f"asked/{question}/{attempt}", 1) == 1
                get_summary = self._collect if is_first else self._wait_for_summary
                survey = get_summary(question, enough)
                if survey is not None:
                    return replace(survey, answers={**survey.answers, self._rank: own})
                if enough():
                    unknown = _STOPPED
                    break
        except RuntimeError:
            unknown = UNREACHABLE
        return Survey({self._rank: own}, unknown=unknown)

    def _recent_summary(self) -> Survey | None:
        """Return the latest summary unless it is too old for a rank that fails a little later."""
        with self._is_new:
            is_recent = time.monotonic() - self._summarised_at < ANSWER_TIME
            return _decode(self.summary) if is_recent else None

    def _collect(self, question: int, enough: Callable[[], bool]) -> Survey:
        deadline = time.monotonic() + ANSWER_TIME
        self._tell_all(2 * question)
        while True:
            # Before the answers: a rank that ends now has answered, or is in the next poll's list.
            ended = self.ended()
            answered = _numbers(self._store.get(f"answered/{question}"))
            if len(answered | ended.keys()) >= self._world_size or time.monotonic() > deadline:
                unknown = ""
                break
            if enough():
                unknown = _STOPPED
                break
            time.sleep(_LOOK)
        keys = [f"answer/{question}/{rank}" for rank in sorted(answered)]
        statuses = (_status(json.loads(value)) for value in self._get_all(keys))
        answers = {status.rank: status for status in statuses}
        survey = Survey(answers, ended, self._first_error(), unknown)
        if unknown:
            return survey  # for this rank alone
        self._store.set(f"summary/{question}", _encode(survey))
        self._store.add("question", 1)
        self._tell_all(2 * question + 1)
        return survey

    def _tell_all(self, number: int) -> None:
        keys = [self._message(rank, number) for rank in range(self._world_size)]
        self._store.multi_set(keys, [""] * len(keys))

    def _get_all(self, keys: Sequence[str]) -> Iterable[bytes]:
        for start in range(0, len(keys), _AT_ONCE):
            yield from self._store.multi_get(keys[start : start + _AT_ONCE])

    def _wait_for_summary(self, question: int, enough: Callable[[], bool]) -> Survey | None:
        deadline = time.monotonic() + ANSWER_TIME + _SPREAD_TIME
        with self._is_new:
            while self._summarised < question and time.monotonic() < deadline:
                if enough():
                    return None
                self._is_new.wait(_LOOK)
            return _decode(self.summary) if self._summarised >= question else None

    # -- ending

    def report(self, status: RankStatus) -> None:
        """Report that this rank has failed by itself, for ranks that ask later.

        Raises:
            RuntimeError: the store does not answer.
        """
        kept = replace(status, failure=status.failure[-_LONGEST:])
        self._store.set(f"error/{self._rank}", json.dumps(asdict(kept)))
        self._store.append("errors", f"{self._rank},")
        self.mark("failed")

    def _first_error(self) -> RankStatus | None:
        if not self._store.check(["errors"]):
            return None
        first = self._store.get("errors").partition(b",")[0].decode()
        return _status(json.loads(self._store.get(f"error/{first}")))

    def mark_joined(self) -> None:
        """Report that this rank is connected to all others; the last rank informs all ranks."""
        with contextlib.suppress(RuntimeError):  # busy: the rank that leaves first waits longer
            if self._store.add("joined", 1) == self._world_size:
                self._store.set("all joined", "")

    def wait_for_all_to_join(self, seconds: float) -> None:
        """Wait until all ranks are connected, for at most this time.

        A rank that left earlier would close connections that another rank is still making.

        Raises:
            RuntimeError: the store does not answer.
        """
        end = time.monotonic() + seconds
        while not self._store.check(["all joined"]) and time.monotonic() < end:
            time.sleep(0.005)

    def mark(self, how: str, what: str = "ended") -> None:
        """Report the end of this rank's script, or of `what`: "done" or "failed".

        Raises:
            RuntimeError: the store does not answer.
        """
        self._store.append(what, f"{self._rank}:{how},")

    def ended(self, what: str = "ended") -> dict[int, str]:
        """Return "done" or "failed" for each rank that has reported an end; see `mark`.

        Raises:
            RuntimeError: the store does not answer.
        """
        if not self._store.check([what]):
            return {}
        listed = self._store.get(what).decode().split(",")
        marks = [mark.partition(":") for mark in listed if mark]
        return {int(rank): how for rank, _, how in marks}

    def leave(self) -> None:
        """End the waiting thread: this rank answers no further queries."""
        if self._left.is_set() or not self._thread.is_alive():
            return
        self._left.set()
        with contextlib.suppress(RuntimeError):  # it ends with its connection
            self._store.set(self._message(self._rank, self._messages), "")
        # A thread that is within torch when the interpreter ends would abort the process.
        self._thread.join(ANSWER_TIME)

    def close(self) -> None:
        """Release the store."""
        self._store.close()
        del self._waiting


def ranges(ranks: Iterable[int]) -> str:
    """Return numbers as text, in order.

    Example:
        >>> ranges([4, 0, 1, 2, 6, 7])
        '0-2, 4, 6, 7'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def by_place(answers: Iterable[RankStatus]) -> dict[str, list[int]]:
    """Return the ranks at each position, the position of the lowest rank first."""
    places: dict[str, list[int]] = {}
    for status in sorted(answers, key=lambda status: status.rank):
        places.setdefault(status.place, []).append(status.rank)
    return places


def _numbers(listed: bytes) -> set[int]:
    return {int(number) for number in listed.split(b",") if number}


def _encode(survey: Survey) -> str:
    """Return a survey as text, with each place once."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, status in survey.answers.items():
        places.setdefault((status.operation, status.line, status.doing), []).append(rank)
    largest = sorted(places.items(), key=lambda place: -len(place[1]))
    shown = [(*place, ranges(ranks)) for place, ranks in largest[:_MOST_PLACES]]
    if others := [rank for _, ranks in largest[_MOST_PLACES:] for rank in ranks]:
        shown.append((f"one of {len(largest) - _MOST_PLACES} other places", "", "", ranges(others)))
    ended = {
        how: ranges(rank for rank, its_end in survey.ended.items() if its_end == how)
        for how in set(survey.ended.values())
    }
    error = None if survey.error is None else asdict(survey.error)
    return json.dumps({"places": shown, "ended": ended, "error": error})


def _decode(encoded: bytes) -> Survey:
    summary = json.loads(encoded)
    answers = {
        rank: _status({"rank": rank, "operation": operation, "line": line, "doing": doing})
        for operation, line, doing, ranks in summary["places"]
        for rank in _in_ranges(ranks)
    }
    ended = {rank: how for how, ranks in summary["ended"].items() for rank in _in_ranges(ranks)}
    error = None if summary["error"] is None else _status(summary["error"])
    return Survey(dict(sorted(answers.items())), ended, error)


def _status(values: dict[str, Any]) -> RankStatus:
    """Return the status that a rank has written to the store; its texts are safe to show."""
    texts = {
        name: format_text(value, _LONGEST, lines=name == "failure")
        for name, value in values.items()
        if isinstance(value, str)
    }
    return RankStatus(**{**values, **texts})


def _in_ranges(text: str) -> Iterable[int]:
    for run in filter(None, text.split(", ")):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
