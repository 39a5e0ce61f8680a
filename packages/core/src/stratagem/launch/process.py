"""What a rank's process has: standard streams, cores, open files. Standard library only."""

from __future__ import annotations

import os
import resource
import sys
import warnings

from stratagem.errors import ConfigurationError


def open_standard_streams() -> None:
    """Let what this process lacks of stdin, stdout and stderr be /dev/null.

    A daemon, `pythonw` or a shell's `>&-` start a process without them. `sys.stdout` is None then,
    and `print(..., file=sys.stderr)` with None prints to stdout; and what is opened next, here or
    in a process that is started from here, gets the number 0, 1 or 2, where libraries write.

    Example:
        >>> from stratagem.launch.process import open_standard_streams
        >>> open_standard_streams()
        >>> sys.stdout is None or sys.stderr is None
        False
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        taken = _is_open(number)
        if not taken:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        stream = getattr(sys, name)
        if name != "stdin" and (stream is None or getattr(stream, "closed", False)):
            # A number that something else has got by now is not to be written to.
            descriptor = os.open(os.devnull, os.O_WRONLY) if taken else number
            null_stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, null_stream)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def printable(text: str, encoding: str | None = None) -> str:
    r"""Return text that can be printed: what the encoding lacks is escaped.

    So a path whose bytes are no UTF-8, or a name with an umlaut where the locale is C, ends no run.

    Args:
        text: what shall be printed.
        encoding: of where it is printed; None: stdout's.

    Example:
        >>> from stratagem.launch.process import printable
        >>> print(printable("Verlust_ü", "ascii"))
        Verlust_\xfc
    """
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_bound(cores: int) -> bool:
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        return cores < len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False  # it belongs to somebody else, or has ended


def threads_per_rank(local_world_size: int) -> str:
    """Return OMP_NUM_THREADS for each of the ranks that share this node's cores.

    A process that may use fewer cores than its parent has been given its own (srun and mpirun bind
    tasks to cores); the others divide what there is.
    """
    cores = available_cores()
    threads = cores if _is_bound(cores) else max(1, cores // local_world_size)
    return os.environ.get("OMP_NUM_THREADS") or str(threads)


_AT_LEAST = 2
"""Connections of a rank to the store: its process group's, and the one that it waits by."""
_AT_MOST = 3
"""With that of a save in the background."""
_OWN = 16
"""Files that any such process has open."""
_OTHERS = 256
"""Files that it may open besides: data, workers, logs."""


def allow_connections(world_size: int) -> None:
    """Raise this process's soft limit of open files, where it is too low for its ranks.

    Args:
        world_size: the number of ranks that connect to the store that this process holds.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = _AT_LEAST * world_size + _OWN, _AT_MOST * world_size + _OTHERS
    if _suffices(soft, wanted):
        return
    if not _suffices(hard, needed):
        raise ConfigurationError(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and its hard limit is {hard}: raise it (`ulimit -Hn`, LimitNOFILE= of "
            "systemd, PropagateResourceLimits= of SLURM)"
        )
    raised = wanted if _suffices(hard, wanted) else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def warn_of_agents_limit(world_size: int) -> None:
    """Warn on rank 0 where the process that started it holds the store, and cannot open enough."""
    if sys.platform != "linux":
        return
    try:
        soft, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:
        return  # another user's
    needed = _AT_LEAST * world_size + _OWN
    if not _suffices(soft, needed):
        warnings.warn(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and the limit of the launcher's (process {os.getppid()}) is {soft}: "
            f"ranks beyond it would wait in vain. Call `ulimit -n {needed}` before the launcher",
            stacklevel=2,
        )


def _suffices(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
