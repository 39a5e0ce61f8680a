"""StatusExchange: how ranks learn from the store where all of them are, by O(ranks) requests."""

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

_Answers = queue.SimpleQueue[tuple[Any, Exception | None]]
_Call = tuple[Callable[..., Any], tuple[Any, ...], _Answers]


class BoundedStore:
    """Makes each call to a store end in time.

    A store's own timeout limits how long it waits for a key. Nothing limits how long it waits for
    an answer over a connection whose other end has disappeared, for example if a cable is pulled.
    A rank that reports its failure would then hang.

    Args:
        store: the store; its calls are made in one thread, which the first call starts.
        seconds: how long a call may take.

    Raises:
        RuntimeError: by a call that takes longer, by those after it until the store answers, and
            by those after `close`.

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
        """Held while a call is under way, also one that nobody waits for any more."""

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
        """Return the value of a key, which is there."""
        value: bytes = self._call("get", key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, which are there, by one request."""
        values: list[bytes] = self._call("multi_get", list(keys))
        return values

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._call("check", keys))

    def close(self) -> None:
        """Let go of the store; a call that is under way ends by itself."""
        self._store = None
        self._calls.put(None)

    def _call(self, name: str, *args: Any) -> Any:
        if self._store is None:
            raise RuntimeError("the store has been closed")
        if not self._waiting.acquire(blocking=False):
            raise RuntimeError("the store has not answered an earlier call yet")
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
            value, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            raise RuntimeError(f"the store has not answered within {self._seconds} s") from None
        if error is not None:
            raise error
        return value


def _make_calls(calls: queue.SimpleQueue[_Call | None], waiting: threading.Lock) -> None:
    """Make the calls of one store, one after another, until it is closed."""
    while (call := calls.get()) is not None:
        function, args, answers = call
        result: tuple[Any, Exception | None]
        try:
            result = function(*args), None
        except Exception as error:
            result = None, error
        # Nothing here keeps the store; and who has the answer may call again.
        del call, function
        waiting.release()
        answers.put(result)
        del result


ANSWER_TIME = 4.0
"""Seconds that the others have to answer, and a call to the store may take."""

_LOOK = 0.05
"""Seconds between two looks of a rank that asks: one request, of the one rank that collects."""
_SPREAD_TIME = 1.0
"""Seconds that the summary has to reach those who wait for it."""
_ATTEMPTS = 2
"""How many ranks try to collect, one after another: the first may be ended while it does."""
_WAIT = timedelta(days=20)
"""What a connection may wait for a message: near the most that torch takes, since it prints a
warning when the time is over."""
_AT_ONCE = 256
"""Values in one request: a store takes 8 MB."""
_LONGEST = 20_000
"""Characters of a traceback that are kept, its last: every rank may read it."""
_MOST_PLACES = 64
"""Places in a summary; who is elsewhere has answered, and no more is said of it."""

_STOPPED = "another rank has failed meanwhile"
_NOT_COLLECTED = "no rank has collected the answers in time"
UNREACHABLE = "the store that the ranks meet at does not answer"
"""Why nothing may be known of other ranks."""


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
        return f"rank {self.rank}: {self.place}"

    @property
    def place(self) -> str:
        """Where it is, without the rank."""
        text = f"in {self.operation}, at {self.line}" if self.line else f"at {self.operation}"
        return f"{text} ({self.doing})" if self.doing else text


@dataclass(frozen=True)
class Survey:
    """What ranks have answered.

    Attributes:
        answers: of those that have answered, in the order of ranks.
        ended: of those whose script is over, "done" or "failed".
        error: of the rank that was the first to fail by itself, with its traceback.
        unknown: why nothing is known of the others; "": they were asked, and had time to answer.
    """

    answers: Mapping[int, RankStatus]
    ended: Mapping[int, str] = field(default_factory=dict)
    error: RankStatus | None = None
    unknown: str = ""


class StatusExchange:
    """Asks all ranks where they are, and answers, by the store of the process group.

    1. A thread of each rank waits for its next message (`listen`): the store answers when there is
       one, so that nothing is sent before.
    2. Of the ranks that ask, the first one sends a message to all, by one request.
    3. Each rank writes its answer, and its number into one list: two requests.
    4. The first one reads the list until all are in it, then the answers, and writes a summary.
       A second message tells all ranks to read it; those who have asked as well wait for that.

    A connection serves one request at a time, and the one that waits is taken by it. The process
    group uses its own whenever it makes communicators, at times that nobody else knows. So a rank
    has two: the group's, by which it asks and reports, and the one that waits.

    Args:
        store: of the process group; a connection of its own is made to wait by.
        rank, world_size: this rank, and how many there are.
        here: returns where this rank is; called in the thread that waits.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, here: Callable[[], RankStatus]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._here = here
        prefix = "stratagem_status"
        prefixed = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._store = BoundedStore(prefixed, seconds=ANSWER_TIME)
        self._waiting = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._messages = 0
        """How many this rank has received: a question, then its summary, and so on."""
        self._answered = -1
        """The latest question that this rank has answered."""
        self.summary = b""
        """The answers to the latest question that was asked by any rank, as it was written."""
        self._summarised, self._summarised_at = -1, -math.inf
        """The question of it, and when the answers came, by `time.monotonic`."""
        self._is_new = threading.Condition()
        """Guards the three above; notified of each summary."""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stratagem-status", daemon=True)

    # -- the thread that waits

    def listen(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def _listen(self) -> None:
        while not self._left.is_set():
            try:
                self._waiting.wait([self._message(self._rank, self._messages)], _WAIT)
                if not self._left.is_set():
                    self.receive(self._waiting)
            except dist.DistStoreError:
                continue  # the time is over, and nobody has asked
            except RuntimeError:
                return  # whoever held the store has gone

    def receive(self, store: Any) -> None:
        """Do what the next message asks for, which is there.

        Args:
            store: to answer by.
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
        # A key for each rank, so that one of them can end its own wait.
        return f"message/{rank}/{number}"

    # -- asking

    def ask(self, own: RankStatus, enough: Callable[[], bool]) -> Survey:
        """Ask every rank; return their answers, or those that others asked for just now.

        Args:
            own: this rank's answer.
            enough: whether no more answers are needed.
        """
        unknown = _NOT_COLLECTED
        try:
            if recent := self._recent_summary():
                error = recent.error or self._first_error()
                return replace(recent, answers={**recent.answers, self._rank: own}, error=error)
            question = self._store.add("question", 0)
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
        """Return answers of just now: those whose collective failed a little later need no more."""
        with self._is_new:
            is_recent = time.monotonic() - self._summarised_at < ANSWER_TIME
            return _decode(self.summary) if is_recent else None

    def _collect(self, question: int, enough: Callable[[], bool]) -> Survey:
        deadline = time.monotonic() + ANSWER_TIME
        self._tell_all(2 * question)
        while True:
            # Before the answers: who ends now has answered or is in the next look's list.
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
        """Report that this rank has failed by itself; whoever asks from here on hears of it.

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
        """Tell that this rank is connected to all others; the last one tells all."""
        with contextlib.suppress(RuntimeError):  # it is busy: who leaves first waits longer
            if self._store.add("joined", 1) == self._world_size:
                self._store.set("all joined", "")

    def wait_for_all_to_join(self, seconds: float) -> None:
        """Return once all ranks are connected, or this time has gone by.

        A rank that left before would close connections that another one is still making.

        Raises:
            RuntimeError: the store does not answer.
        """
        end = time.monotonic() + seconds
        while not self._store.check(["all joined"]) and time.monotonic() < end:
            time.sleep(0.005)

    def mark(self, how: str) -> None:
        """Write down that this rank's script is over, "done" or "failed".

        Raises:
            RuntimeError: the store does not answer.
        """
        self._store.append("ended", f"{self._rank}:{how},")

    def ended(self) -> dict[int, str]:
        """Return the ranks whose script is over, and how it ended.

        Raises:
            RuntimeError: the store does not answer.
        """
        if not self._store.check(["ended"]):
            return {}
        listed = self._store.get("ended").decode().split(",")
        marks = [mark.partition(":") for mark in listed if mark]
        return {int(rank): how for rank, _, how in marks}

    def leave(self) -> None:
        """End the thread that waits; nobody is answered from here on."""
        if self._left.is_set() or not self._thread.is_alive():
            return
        self._left.set()
        try:
            self._store.set(self._message(self._rank, self._messages), "")
        except RuntimeError:
            return  # it ends with its connection
        self._thread.join(ANSWER_TIME)

    def close(self) -> None:
        """Let go of the store."""
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
    """Return the ranks at each place, the place of the lowest rank first."""
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
