"""The standard streams, cores and memory of a rank's process. Standard library only."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from stratagem.discovery.entry_points import read_text
from stratagem.system import available_cores as available_cores


def open_standard_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr if this process lacks them.

    A daemon, `pythonw` or a shell's `>&-` starts a process without these streams. Then `sys.stdout`
    is None, and `print(..., file=sys.stderr)` with None prints to stdout. The next file opened here
    or in a child process gets the number 0, 1 or 2, to which libraries write.

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
            # If another file has this number, nothing may be written to it.
            descriptor = os.open(os.devnull, os.O_WRONLY) if taken else number
            null_stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, null_stream)


@contextmanager
def numpy_warned_once() -> Iterator[None]:
    """Suppress torch's warning that NumPy is missing, here and in processes started within.

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


HINTS_VARIABLE = "STRATAGEM_HINTS"
"""0: hints are not printed."""


def are_hints_on() -> bool:
    """Return whether hints are printed."""
    return os.environ.get(HINTS_VARIABLE) != "0"


def print_hint(hint: str) -> None:
    """Print a hint to stderr, unless STRATAGEM_HINTS=0 switches hints off."""
    if are_hints_on():
        print(f"stratagem: {hint}", file=sys.stderr, flush=True)


@functools.cache
def print_hint_once(hint: str) -> None:
    """Print a hint to stderr, once in a process."""
    print_hint(hint)


def printable(text: str, encoding: str | None = None) -> str:
    r"""Return printable text: characters that the encoding lacks are escaped.

    Printing a path that is not UTF-8, or a name with an umlaut in the locale C, then raises no
    error.

    Args:
        text: the text to print.
        encoding: the encoding of the output; None: stdout's.

    Example:
        >>> from stratagem.launch.process import printable
        >>> print(printable("Verlust_ü", "ascii"))
        Verlust_\xfc
    """
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def host_memory() -> int | None:
    """Return the bytes of memory that all processes on this machine may use together.

    None: the amount is unknown.
    """
    if not hasattr(os, "sysconf"):
        return None
    total: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        # Without a limit the file has "max", which int() refuses.
        return min(total, int(read_text("/sys/fs/cgroup/memory.max")))
    except ValueError:
        return total


def _is_bound(cores: int) -> bool:
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        return cores < len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False  # the parent belongs to another user, or has ended


def threads_per_rank(local_world_size: int) -> str:
    """Return OMP_NUM_THREADS for each of the ranks that share this node's cores.

    A process that may use fewer cores than its parent has cores of its own (srun and mpirun bind
    tasks to cores). Other processes divide the available cores.
    """
    cores = available_cores()
    threads = cores if _is_bound(cores) else max(1, cores // local_world_size)
    return os.environ.get("OMP_NUM_THREADS") or str(threads)
