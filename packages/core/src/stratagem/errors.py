"""The exceptions that Stratagem raises.

::

    StratagemError
    ├── ConfigurationError          what was asked for cannot be (also a ValueError)
    │   ├── UnknownNameError        no component has that name (also a LookupError)
    │   ├── AmbiguousNameError      several distributions claim that name
    │   └── MissingPackageError     an optional package is not installed (also an ImportError)
    ├── PluginError                 a plugin, or a component of one, breaks its contract
    ├── UserCodeError               a Module, loader or callback breaks its contract
    │   └── NonFiniteLossError      the loss is NaN or infinite and detection is on
    ├── CheckpointError
    │   ├── CheckpointNotFoundError (also a FileNotFoundError)
    │   ├── CheckpointCorruptError  the file is not a whole, safe checkpoint
    │   │   └── CheckpointFormatError   it is of another format
    │   ├── CheckpointSaveError (also an OSError)  the file system refused it
    │   ├── CheckpointMismatchError it belongs to another model
    │   └── CheckpointContentError  a value to be saved is not weights-only-safe data
    ├── RankFailedError             another rank ended; holds its rank, exit code and traceback
    ├── CommunicationError          a collective failed; names the ranks that are missing
    └── DivergenceError             ranks that ought to be alike differ; says which, and in what

Every message says what was expected, what was received, and what to do next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

__all__ = [
    "AmbiguousNameError",
    "CheckpointContentError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CommunicationError",
    "ConfigurationError",
    "DivergenceError",
    "MissingPackageError",
    "NonFiniteLossError",
    "PluginError",
    "RankFailedError",
    "StratagemError",
    "UnknownNameError",
    "UserCodeError",
    "format_names",
    "format_size",
    "format_text",
    "format_value",
    "with_explanation",
]


class StratagemError(Exception):
    """Base of every exception that Stratagem raises on purpose."""


class ConfigurationError(StratagemError, ValueError):
    """The request cannot be met; raised before any process starts if possible."""


class UnknownNameError(ConfigurationError, LookupError):
    """No discovered or registered component has that name."""


class AmbiguousNameError(ConfigurationError):
    """Several distributions claim that name, and it was selected without a qualifier."""


class MissingPackageError(ConfigurationError, ModuleNotFoundError):
    """The request needs a package that is not installed; names the command for it."""

    # ModuleNotFoundError formats its own arguments; ours is one sentence.
    def __str__(self) -> str:
        return str(self.args[0])


class PluginError(StratagemError):
    """A plugin or a component of one does not keep its side of the contract."""


class UserCodeError(StratagemError):
    """A Module, DataModule, loader or callback does not keep its side of the contract."""


class NonFiniteLossError(UserCodeError):
    """The loss is NaN or infinite and `detect_anomaly=True`."""


class CheckpointError(StratagemError):
    """A checkpoint cannot be saved, found, read or used.

    The message may quote the file, so it is passed through `format_text`, without a last line of
    `with_explanation`.
    """

    def __init__(self, message: str) -> None:
        text, leads_to, name = message.partition(_LEADS_TO)
        super().__init__(format_text(text, _LONGEST) + leads_to + format_text(name))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is at the path."""

    # FileNotFoundError formats its own arguments as an errno; ours is one sentence.
    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointCorruptError(CheckpointError):
    """The file is truncated, damaged, or holds something that loading would have to execute."""


class CheckpointFormatError(CheckpointCorruptError):
    """The file is of another checkpoint format than the one that was asked to read it."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint cannot be written: no space, no right, or a failing disk.

    Args:
        message: one sentence.
        errno: the number of the error, as in `OSError`.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    # As in CheckpointNotFoundError.
    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointMismatchError(CheckpointError):
    """The checkpoint belongs to another model or optimizer.

    Args:
        message: the difference, and a remedy.
        missing: names of the model's weights that the checkpoint lacks.
        unexpected: names of the checkpoint's weights that the model lacks.
    """

    def __init__(
        self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a CheckpointMismatchError of whoever knows the contents name the checkpoint too."""
    try:
        yield
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            f"{os.fspath(path)!r}: {error}", error.missing, error.unexpected
        ) from error


class CheckpointContentError(CheckpointError):
    """Something to be saved is not weights-only-safe data and could not be loaded safely again."""


class RankFailedError(StratagemError, RuntimeError):
    """A rank that was started by this process ended with an error.

    Attributes:
        rank: the rank that failed first.
        exit_code: its exit code; the negated signal number if a signal ended it.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CommunicationError(StratagemError, RuntimeError):
    """A collective failed: a rank is missing, cannot be reached, or runs something else.

    Attributes:
        missing: the ranks that did not answer a query of their position, or that failed.
        where: the operation and the line of this rank.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = (), where: str = "") -> None:
        super().__init__(message)
        self.missing = missing
        self.where = where


class DivergenceError(StratagemError):
    """`detect_divergence` has found ranks that differ where they ought to be alike."""


_ALL_FRAMES = "STRATAGEM_FULL_TRACEBACKS"
"""1: errors keep all frames of their traceback."""
_INTERNAL = ("stratagem", "torch", "contextlib", "functools", "pluggy")
"""Packages whose frames say nothing about a mistake of the caller."""


def hide_frames(error: BaseException) -> bool:
    """Remove the frames of Stratagem and torch from an error that reports a mistake of the caller.

    The frames of the caller and of the caller's hooks stay. Set STRATAGEM_FULL_TRACEBACKS=1 to see
    all frames.

    Returns:
        Whether the error is of that kind.

    Example:
        >>> from stratagem.errors import ConfigurationError, hide_frames
        >>> hide_frames(ConfigurationError("devices=0")), hide_frames(ZeroDivisionError())
        (True, False)
    """
    mistakes = (ConfigurationError, UserCodeError, CheckpointError, RankFailedError)
    if not isinstance(error, mistakes) or os.environ.get(_ALL_FRAMES) == "1":
        return False
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one.__traceback__ = _without_internal(one.__traceback__)
        one = one.__cause__ or one.__context__
    return True


def _without_internal(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of `_INTERNAL`."""
    frames = []
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _INTERNAL and not package.startswith("stratagem_"):
            frames.append(trace)
        trace = trace.tb_next
    for one in reversed(frames):
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace


_LEADS_TO = "\nFor an explanation: stratagem errors "


def with_explanation(message: str, name: str) -> str:
    """Return a message with a last line that leads to the explanation of the error.

    Args:
        message: the expected value, the received value, and the next step for the user.
        name: an explanation, as `stratagem errors` lists them.

    Example:
        >>> from stratagem.errors import with_explanation
        >>> print(with_explanation("rank 1 does not answer", "hang"))
        rank 1 does not answer
        For an explanation: stratagem errors hang
    """
    return f"{message}{_LEADS_TO}{name}"


_SHOWN = 200
"""Characters of a value in a message: a path, with some room."""
_LONGEST = 10_000
"""Characters of a whole message."""


def format_size(size: float) -> str:
    """Return a number of bytes as text: in GiB, or where that would be nearly 0, in MiB.

    Example:
        >>> format_size(3 * 2**29), format_size(3 * 2**19)
        ('1.50 GiB', '1.50 MiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def format_text(text: str, most: int = _SHOWN, *, lines: bool = False) -> str:
    r"""Return text that was not written by Stratagem, in a form that is safe to show.

    Every string that comes from a file, a plugin or a peer passes through this function, or through
    `format_value` or `format_names`, before it reaches a terminal or a log. Control characters,
    line ends and characters that change the direction of writing are escaped.

    Args:
        text: the string.
        most: the number of characters after which the text is cut.
        lines: keep line ends, for a traceback.

    Example:
        >>> from stratagem.errors import format_text
        >>> print(format_text("head\x1b[2J\nstratagem: all is well"))
        head\x1b[2J\nstratagem: all is well
    """
    cut = f"{text[:most]}..." if len(text) > most else text
    if cut.isprintable():
        return cut
    return "".join(
        one
        if one.isprintable() or (lines and one == "\n")
        else one.encode("unicode_escape").decode()
        for one in cut
    )


def format_names(names: Iterable[object], most: int = 5) -> str:
    """Return names from a file or a plugin as a list for a message.

    Example:
        >>> from stratagem.errors import format_names
        >>> format_names(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    listed = list(names)
    shown = ", ".join(
        format_text(name) if isinstance(name, str) else format_value(name) for name in listed[:most]
    )
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"


def format_value(value: object) -> str:
    """Return how a message shows a value that a file holds: a number or a text, else its type.

    What a file holds may share its parts, so that a few hundred bytes have a repr that fills the
    memory.

    Example:
        >>> from stratagem.errors import format_value
        >>> format_value("epoch=1.ckpt"), format_value([["a"]])
        ("'epoch=1.ckpt'", 'a list')
    """
    if isinstance(value, (str, bytes)):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    is_short = type(value) is int and abs(value) < 1 << 64
    if value is None or type(value) in (bool, float) or is_short:
        return repr(value)
    return f"a {type(value).__name__}"
