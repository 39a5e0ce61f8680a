"""How the calls of all ranks end: what they return, or which failure is the cause of the others."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError

from stratagem_ray.actor import Outcome

_NEWS_GRACE = 3.0
"""Seconds in which a rank may still tell of the error that another one's end results from."""
_LOST_GRACE = 60.0
"""Seconds in which Ray may still declare dead whom the others have lost: it takes about half a
minute where a machine is cut off."""


class Why(enum.IntEnum):
    """Why a rank has failed; what comes first is the cause of what comes after."""

    RAISED = 0
    DIED = 1
    LOST_OTHERS = 2


@dataclass(frozen=True)
class Failed:
    """How a rank has failed.

    Attributes:
        rank: which one.
        why: of what kind it is.
        exit_code: its exit code.
        report: the traceback of what it raised.
        how: what Ray says of its end.
    """

    rank: int
    why: Why
    exit_code: int = 1
    report: str = ""
    how: str = ""

    @property
    def was_lost(self) -> bool:
        """Whether another start may succeed: nothing that it ran has raised an error."""
        return self.why != Why.RAISED


def wait_for_all(calls: Sequence[Any], meanwhile: Callable[[], None]) -> list[Any] | Failed:
    """Return what the calls of all ranks return, or the failure that is the cause.

    Args:
        calls: references of Ray, by rank.
        meanwhile: called about twice a second.
    """
    waiting = {call: rank for rank, call in enumerate(calls)}
    values: dict[int, Any] = {}
    failures: list[Failed] = []
    since: dict[Why, float] = {}
    while waiting and not _is_known(failures, since):
        meanwhile()
        # Briefly, so that Ctrl-C comes through.
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.5)
        for call in done:
            rank = waiting.pop(call)
            value = _end_of(rank, call)
            if isinstance(value, Failed):
                failures.append(value)
                since.setdefault(value.why, time.monotonic())
            else:
                values[rank] = value
    if failures:
        return min(failures, key=lambda failed: failed.why)  # of several, the first
    return [values[rank] for rank in range(len(calls))]


def _is_known(failures: Sequence[Failed], since: dict[Why, float]) -> bool:
    """Whether the cause of failures is known, or nobody is expected to tell it any more."""
    if not failures or Why.RAISED in since:
        return bool(failures)
    why, grace = (Why.DIED, _NEWS_GRACE) if Why.DIED in since else (Why.LOST_OTHERS, _LOST_GRACE)
    return time.monotonic() - since[why] >= grace


def _end_of(rank: int, call: Any) -> Any:
    try:
        value = ray.get(call)
    except RayTaskError as error:
        return Failed(rank, Why.RAISED, report=str(error))
    except RuntimeEnvSetupError as error:
        return Failed(rank, Why.RAISED, how=f"could not be started: {_line(error)}")
    except RayError as error:
        if isinstance(error, RayActorError) and error.actor_init_failed:
            return Failed(rank, Why.RAISED, how=f"could not be started: {_line(error)}")
        how = "was lost, by a signal such as SIGKILL, a crash, or with its node"
        return Failed(rank, Why.DIED, how=f"{how} ({_line(error)})")
    if not isinstance(value, Outcome) or not value.exit_code:
        return value
    if value.exit_code == 128 + signal.SIGTERM:
        # Its node is to be taken away: the run was saved, and can go on elsewhere.
        return Failed(rank, Why.DIED, value.exit_code, how="was told to end by SIGTERM")
    why = Why.LOST_OTHERS if value.lost_others else Why.RAISED
    return Failed(rank, why, value.exit_code, value.report)


def _line(error: RayError) -> str:
    """Return what Ray says, in one line, from where it says why, without its guesses."""
    text = " ".join(str(error).split())
    why = text.partition("The actor is dead because ")[2] or text
    return why.partition(" Some common causes include")[0]
