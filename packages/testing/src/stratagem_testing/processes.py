"""Processes that the kit starts: without a launch's variables, and none of them left at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_OF_A_CLUSTER = ("SLURM_", "OMPI_", "PMI", "LSB_", "JSM_")
_OF_A_LAUNCH = ("MASTER_", "STRATAGEM_", "TORCHELASTIC_")
_OF_A_RANK = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def is_of_a_launch(variable: str) -> bool:
    """Whether an environment variable is one that a launch sets for its ranks."""
    return variable.startswith(_OF_A_LAUNCH) or variable in _OF_A_RANK


def clean_environment(search_path: Iterable[str] = ()) -> dict[str, str]:
    """Return this process's variables without launch variables, for a rank on a busy machine.

    Args:
        search_path: folders that are searched for modules, in addition to PYTHONPATH.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not is_of_a_launch(name) and not name.startswith(_OF_A_CLUSTER)
    }
    path = [*search_path, *filter(None, [kept.get("PYTHONPATH")])]
    if path:
        kept["PYTHONPATH"] = os.pathsep.join(path)
    return {**kept, "OMP_NUM_THREADS": "1"}


def end_session(session: int, patience: float) -> tuple[str, ...]:
    """Kill the remaining processes of a session of the operating system.

    Args:
        session: the process id of its first process.
        patience: the time in seconds in which its processes may end by themselves.

    Returns:
        The command lines of the processes that still existed then.
    """
    left = _gone_in(patience, lambda: _processes(lambda fields: int(fields[3]) == session))
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return tuple(line for _, line in left)


def end_children(patience: float) -> tuple[str, ...]:
    """Kill the children of this process; as `end_session`."""
    own = os.getpid()

    def look() -> list[tuple[int, str]]:
        return _processes(lambda fields: int(fields[1]) == own)

    found: list[str] = []
    left = _gone_in(patience, look)
    while left:
        for pid, line in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found.append(line)
        left = look()  # their children have become this process's
    _reap()
    return tuple(found)


def _reap() -> None:
    """Take note of the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _gone_in(
    patience: float, look: Callable[[], Sequence[tuple[int, str]]]
) -> Sequence[tuple[int, str]]:
    """Return what is still there when the time is over."""
    until = time.monotonic() + patience
    left = look()
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = look()
    return left


def _processes(belongs: Callable[[list[str]], bool]) -> list[tuple[int, str]]:
    """Return ids and command lines of the processes whose fields in /proc (see proc(5)) belong."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and belongs(fields):
                line = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ")
                found.append((int(stat.parent.name), line.decode(errors="replace").strip()))
        except OSError:
            continue
    return found
