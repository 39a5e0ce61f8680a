"""HangWatch: ends a rank that receives a signal while it waits in a collective.

A thread that waits in a collective runs no Python code, and therefore no signal handlers. SIGTERM
and Ctrl-C seem to be ignored until the collective times out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial

from stratagem import system
from stratagem.errors import CommunicationError, with_explanation
from stratagem.launch import record_failure
from stratagem_torch.distributed.diagnosis.rank_status import COLLECTIVES, RankStatuses
from stratagem_torch.distributed.diagnosis.status_exchange import RankStatus, Survey

_SIGNALS = frozenset(system.ENDING)
_PAUSE = 3.0
"""Seconds between two queries of the ranks; a collective that completes takes less."""
_TURN = 2.0
"""Seconds that the other ranks wait for rank 0, so that only one message is printed."""


class HangWatch:
    """Watches for SIGINT, SIGTERM and SIGHUP beside the main thread of a rank.

    After the first signal, the rank ends once the ranks wait in different collectives, which
    cannot complete. After the second, it ends wherever it waits in a collective. It prints where
    each rank is, and exits with 128 plus the signal's number. A rank that is not in a collective
    handles its signals itself. If others wait for it after the first signal, and no rank moves, one
    of them prints where each rank is, and waits on: it may be saving a checkpoint.

    Args:
        statuses: the statuses of the ranks. A new group of the same ranks replaces them.
    """

    def __init__(self, statuses: RankStatuses) -> None:
        self.statuses = statuses
        self._received = 0
        self._write = -1

    def start(self) -> None:
        """Start, if this is the main thread and no other code (asyncio, say) reads its signals."""
        is_main = threading.current_thread() is threading.main_thread()
        if sys.platform == "win32" or not is_main:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        other = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            os.close(read)
            os.close(write)
            return
        self._write = write
        # A worker of a data loader has signals of its own.
        system.at_fork(after_in_child=partial(_forget, write))
        threading.Thread(
            target=self._watch, args=(read,), name="stratagem-hang-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop: from then on, only the main thread handles signals."""
        if self._write >= 0:
            _forget(self._write)
            os.close(self._write)
            self._write = -1

    def _watch(self, descriptor: int) -> None:
        while received := os.read(descriptor, 1):
            if received[0] not in _SIGNALS:
                continue
            self._received += 1
            if self._received <= 2:
                look = self._end_if_hanging if self._received == 1 else self._end_if_waiting
                threading.Thread(target=look, args=(received[0],), daemon=True).start()
        os.close(descriptor)

    def _end_if_hanging(self, number: int) -> None:
        """End this rank once all ranks wait in different collectives; else say where they wait."""
        before: dict[int, RankStatus] = {}
        is_said = False
        while self._received == 1:
            time.sleep(_PAUSE)
            if self.statuses.here().operation not in COLLECTIVES:
                before = {}
                continue
            survey = self.statuses.ask()
            now = dict(survey.answers)
            if now == before and _is_deadlock(now, self.statuses.world_size):
                self._end(number, survey)
            waiting = [rank for rank, own in now.items() if own.operation in COLLECTIVES]
            if now == before and not is_said and self.statuses.rank == min(waiting, default=None):
                _say(self._message(number, survey, "A second signal ends the ranks that wait"))
                is_said = True
            before = now

    def _end_if_waiting(self, number: int) -> None:
        """End this rank after the second signal, if it still waits in a collective."""
        here = self.statuses.here()
        time.sleep(1.0)
        if here.operation in COLLECTIVES and self.statuses.here() == here:
            self._end(number, self.statuses.ask())

    def _end(self, number: int, survey: Survey) -> None:
        if self.statuses.rank != 0:
            time.sleep(_TURN)
        rule = "Every rank must call the same collectives in the same order"
        message = with_explanation(self._message(number, survey, rule), "hang")
        if not self._rank_0_has_said_it():
            _say(message)
        record_failure(CommunicationError(message))
        os._exit(128 + number)

    def _message(self, number: int, survey: Survey, last: str) -> str:
        silent = [r for r in range(self.statuses.world_size) if r not in survey.answers]
        name = signal.Signals(number).name
        lines = [f"{name} while the ranks wait in collectives. Where the ranks are:"]
        return "\n".join(
            [*lines, *(f"  {line}" for line in self.statuses.described(survey, silent)), last]
        )

    def _rank_0_has_said_it(self) -> bool:
        exchange = self.statuses.exchange
        try:
            said = exchange.ended().get(0) == "failed"
            exchange.mark("failed")
        except RuntimeError:  # the store has gone with the rank that held it
            return False
        return said


def _is_deadlock(statuses: dict[int, RankStatus], world_size: int) -> bool:
    """Return whether all ranks wait in collectives, and not all in the same one."""
    operations = {status.operation for status in statuses.values()}
    return len(statuses) == world_size and len(operations) > 1 and operations <= COLLECTIVES


def _say(message: str) -> None:
    print(f"stratagem: {message}", file=sys.stderr, flush=True)


def _forget(descriptor: int) -> None:
    other = signal.set_wakeup_fd(-1)
    if other not in (-1, descriptor):
        signal.set_wakeup_fd(other)
