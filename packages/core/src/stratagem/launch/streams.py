"""Standard streams for a process that was started without them. Standard library only."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Let what this process lacks of stdin, stdout and stderr be /dev/null.

    A daemon, `pythonw` or a shell's `>&-` start a process without them. `sys.stdout` is None then,
    and `print(..., file=sys.stderr)` with None prints to stdout; and what is opened next, here or
    in a process that is started from here, gets the number 0, 1 or 2, where libraries write.

    Example:
        >>> from stratagem.launch.streams import open_standard_streams
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
        >>> from stratagem.launch.streams import printable
        >>> print(printable("Verlust_ü", "ascii"))
        Verlust_\xfc
    """
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
