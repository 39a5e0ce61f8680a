"""What a rank's process has: standard streams and cores. Standard library only."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from stratagem.discovery.entry_points import read_text


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


@contextmanager
def numpy_warned_once() -> Iterator[None]:
    """Keep torch from warning again that NumPy is missing: here, and in processes started within.

    Example:
        >>> from stratagem.launch.process import numpy_warned_once
        >>> with numpy_warned_once():
        ...     pass  # start ranks
    """
    if find_spec("numpy") is not None:
        yield
        return
    message = "Failed to initialize NumPy"
    warnings.filterwarnings("ignore", message)
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, f"ignore:{message}:UserWarning")))
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def print_hint(hint: str) -> None:
    """Print a hint to stderr."""
    print(f"stratagem: {hint}", file=sys.stderr, flush=True)


@functools.cache
def print_hint_once(hint: str) -> None:
    """Print a hint to stderr, once in a process."""
    print_hint(hint)


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


def host_memory() -> int | None:
    """Return the bytes of memory that processes here may use together; None: it is not known."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        # "max" where there is no limit, which int() refuses.
        return min(total, int(read_text("/sys/fs/cgroup/memory.max")))
    except ValueError:
        return total


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
