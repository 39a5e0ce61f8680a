"""Interruption: ends a fit on all ranks when one receives a signal or max_time is up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.ranks import Ranks
from stratagem.launch.process import printable
from stratagem.launch.rank import this_rank

_EVERY = 0.5
"""Seconds between two exchanges with the other ranks, as far as steps allow."""


class Interruption:
    """Makes all ranks end a fit after the same step, or between two epochs.

    From `begin` to `finish`, this handles SIGTERM and the cluster's signals of preemption, unless
    the user has handlers for them. `finish` delivers a signal that came after the last check.

    Ranks may receive a signal at different times, or only one rank receives it. So they exchange
    four numbers by an all-reduce, about twice a second. The number of steps between exchanges
    follows from the slowest rank's last steps, and is the same on every rank. A single process
    checks after every step.

    Args:
        ranks: the ranks that end together.
        environment: the cluster environment, which knows the signals of preemption.
        max_time: the time limit of the fit in seconds. None: no limit.
        stop: ends training after the current step.
        save: saves a checkpoint before a signal ends the process, and returns its path, if any.
    """

    def __init__(
        self,
        ranks: Ranks,
        environment: ClusterEnvironment,
        max_time: float | None,
        *,
        stop: Callable[[], None],
        save: Callable[[], str | None],
    ) -> None:
        self._stop = stop
        self._save = save
        self.signal: signal.Signals | None = None
        """The signal that ends this run, after all ranks have agreed."""
        self._ranks = ranks
        self._environment = environment
        self._received = 0
        self._began = time.monotonic()
        self._deadline = None if max_time is None else self._began + max_time
        self.is_alone = ranks.world_size == 1
        """Whether this is the only process, so that the clock of other ranks does not matter."""
        self._steps = 0
        self._interval = 1
        self._checked_at = self._began
        self._agreed = 0.0
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Handle signals; called before the sanity check."""
        if threading.current_thread() is threading.main_thread():
            wanted = {signal.SIGTERM, *self._environment.preemption_signals}
            for number in wanted:
                handler = signal.getsignal(number)
                if handler == signal.SIG_DFL or handler in this_rank.handlers:
                    self._before[number] = signal.signal(number, self._receive)

    def finish(self) -> None:
        """Restore the former handlers; deliver a signal to them that no check has seen."""
        for number, handler in self._before.items():
            # A handler that the user's code has set since then stays.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before.clear()
        received, self._received = self._received, 0
        if received and self.signal is None:
            signal.raise_signal(received)

    @property
    def is_pending(self) -> bool:
        """Whether `finish` will deliver a signal."""
        return self._received > 0 and self.signal is None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def end_if_due(self) -> None:
        """End the fit after the current step, on every rank, after a signal or the time limit.

        Raises:
            SystemExit: a signal ends it.
        """
        if self.is_alone:
            if self._received or self._deadline is not None:
                self._end_if(self._received, self.is_time_up())
            return
        self._steps += 1
        if self._steps >= self._interval:
            self._end_if(*self._of_all_ranks())

    def end_between_epochs_if_due(self) -> None:
        """End the fit before the next epoch, on every rank, after a signal or the time limit.

        Ranks always exchange here: the validation before may have taken any time.

        Raises:
            SystemExit: a signal ends it.
        """
        if self.is_alone:
            self.end_if_due()
            return
        interval = self._interval
        of_all = self._of_all_ranks()
        self._interval = interval  # the time of a validation says nothing about steps
        self._end_if(*of_all)

    def _end_if(self, received: int, is_time_up: bool) -> None:
        if received:
            self.signal = signal.Signals(received)
            self._end_process(self.signal)
        if is_time_up:
            self._stop()

    def is_time_up(self) -> bool:
        """Return whether `max_time` has passed on this rank."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _of_all_ranks(self) -> tuple[int, bool]:
        """Return the signal that any rank has received, and whether time is up on any rank."""
        now = time.monotonic()
        times = [int((now - since) * 1e6) for since in (self._checked_at, self._began)]
        own = [int(self._received), int(self.is_time_up()), *times]
        # Numbers instead of a tensor, because a tensor would wait for a device.
        most = self._ranks.all_reduce_ints(own, "max")
        self._agreed = most[3] / 1e6
        fitting = int(self._interval * _EVERY / max(most[2] / 1e6, 1e-6))
        # Grows slowly: the next steps may take longer than these.
        self._interval = max(1, min(fitting, 4 * self._interval))
        self._checked_at, self._steps = now, 0
        return most[0], bool(most[1])

    def end_within(self, seconds: float) -> None:
        """End the fit after this number of seconds at the latest."""
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def agreed_time(self) -> float:
        """Return the seconds from the start of the fit to the last check of all ranks.

        The time is the same on every rank. A single process returns the time until now.
        """
        return time.monotonic() - self._began if self.is_alone else self._agreed

    def _end_process(self, received: signal.Signals) -> None:
        """End this process in order: save, let the cluster start it again, exit.

        Raises:
            SystemExit: always, with 128 and the signal's number.
        """
        environment = self._environment
        saved = self._save()
        text = f"stratagem: {received.name}: training ends here"
        if self._ranks.is_global_zero:
            if saved:
                text += f", saved as {saved}"
            if environment.requeues_upon(received) and environment.requeue():
                text += "; the job is queued again"
            print(printable(text), flush=True)
        this_rank.interrupted = True
        raise SystemExit(128 + received)
