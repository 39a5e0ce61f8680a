"""The end of a rank's process group: in order, so that nobody waits for a rank that has gone."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from stratagem.distributed.diagnosis.rank_status import RankStatuses, described
from stratagem.distributed.diagnosis.stack import COLLECTIVES
from stratagem.distributed.diagnosis.status_exchange import RankStatus, Survey
from stratagem.errors import CommunicationError
from stratagem.launch.rank import record_failure, this_rank

_PATIENCE = 10.0
"""Seconds that rank 0, at its end, waits for the others before it asks where they are."""


def leave_process_group(statuses: RankStatuses) -> None:
    """Leave the group when all ranks are done, or at once where this one has failed."""
    try:
        if not this_rank.failed:
            _leave_together(statuses)
    except RuntimeError:
        pass  # the store has gone with the rank that held it: there is nobody to wait for
    statuses.leave()
    if this_rank.device_is_lost:
        # The group would wait for what its device still has to do. Nor can threads of a group that
        # is alive be left to the end of the interpreter.
        if this_rank.failed:
            this_rank.at_end.insert(0, _exit_with_error)
        return
    if dist.is_initialized():
        dist.destroy_process_group()
        statuses.exchange.close()
        _wait_for_communication_threads()


def _leave_together(statuses: RankStatuses) -> None:
    """Mark this rank done; rank 0 waits for the others, which may need the store that it holds.

    A rank that waits in a collective waits for this one, in vain: then the run has failed.
    """
    if statuses.rank != 0:
        statuses.exchange.wait_for_all_to_join(_PATIENCE)
        # Last, since rank 0 may end with the store as soon as it is done.
        statuses.leave()
        statuses.mark_done()
        return
    statuses.mark_done()
    asked_at = time.monotonic() + _PATIENCE
    before: dict[int, RankStatus] = {}
    said = False
    while staying := statuses.staying():
        if this_rank.lost_peer or this_rank.peers_are_gone():
            return  # whoever has started them reports it
        time.sleep(0.002 if time.monotonic() < asked_at - _PATIENCE + 1 else 0.1)
        if time.monotonic() < asked_at:
            continue
        asked_at = time.monotonic() + _PATIENCE
        survey = statuses.ask()
        now = {rank: status for rank, status in survey.answers.items() if rank in staying}
        stuck = {rank: status for rank, status in now.items() if status == before.get(rank)}
        if any(status.operation in COLLECTIVES for status in stuck.values()):
            _end_with_error(
                "this rank (0) has ended, and others wait for it in a collective:\n"
                + "\n".join(f"  {line}" for line in described(Survey(stuck), []))
                + "\nEvery rank must call the same collectives and take the same number of steps"
            )
        if before and not (now or before.keys() & staying):
            return  # they have ended without a word, or cannot be reached
        before = {**now, 0: statuses.here()}
        if not said:
            said = True
            silent = sorted(staying - now.keys())
            where = "; ".join(described(Survey(now, unknown=survey.unknown), silent))
            print(
                f"stratagem: rank 0 is done; it waits for the others. {where}",
                file=sys.stderr,
                flush=True,
            )


def fail_at_end(error: BaseException, what: str) -> None:
    """Let this process, which is ending already, exit with an error once all else is done."""
    record_failure(error)
    shown = "".join(traceback.format_exception(error))
    print(f"stratagem: {what}:\n{shown}", end="", file=sys.stderr, flush=True)
    this_rank.failed = True
    # What is called at the end is called from the last to the first.
    this_rank.at_end.insert(0, _exit_with_error)


def _exit_with_error() -> None:
    sys.stdout.flush()
    os._exit(1)


def _end_with_error(message: str) -> NoReturn:
    """End this process with an error while it is ending already, when nobody can catch one."""
    error = CommunicationError(message)
    record_failure(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _wait_for_communication_threads(timeout: float = 1.0) -> None:
    """Wait until gloo's threads are idle.

    A model that was wrapped by DDP keeps them alive. A thread that still releases a tensor while
    the interpreter shuts down aborts the process.
    """
    deadline = time.monotonic() + timeout
    idle_looks = 0
    # One that waits for the interpreter's lock at a look gets it during the sleep before the next.
    while idle_looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        idle_looks = idle_looks + 1 if not _busy_threads("pt_gloo_runloop") else 0


def _busy_threads(name: str) -> int:
    """Return how many threads of this process with that name are not asleep; 0 if not on Linux."""
    busy = 0
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except OSError:
            continue  # ended since the listing
        busy += before.partition("(")[2] == name and after.split()[0] != "S"
    return busy
