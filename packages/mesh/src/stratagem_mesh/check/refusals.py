"""Errors of a comparison, each as one line, also those of the processes of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratagem.errors import (
    ConfigurationError,
    RankFailedError,
    StratagemError,
    UserCodeError,
    format_text,
)
from stratagem.launch import line_in_traceback

_LONGEST = 500
"""Characters of a message that is not ours."""


def imported(target: str, what: str) -> Any:
    """Return the object that `module:name` stands for.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such name.
    """
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ConfigurationError(
            f"{what} is {target!r}: expected module:name, found from this folder or installed"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"cannot import {what} {target!r}: {type(error).__name__}: "
            f"{format_text(str(error), _LONGEST)}. Expected module:name, found from this folder or "
            "installed"
        ) from error


@contextmanager
def in_one_line(note: Path | None = None) -> Iterator[None]:
    """Convert an error of the user's code to a UserCodeError that names the line.

    Args:
        note: the file to which a rank writes the message for the process that started it.

    Raises:
        UserCodeError: the code raised another error than a StratagemError.
    """
    try:
        yield
    except StratagemError as error:
        _write(note, str(error))
        raise
    except Exception as error:
        message = format_text(str(error), _LONGEST)
        text = f"{type(error).__name__}: {message} ({line_in_traceback(error)})"
        _write(note, text)
        raise UserCodeError(text) from error


def _write(note: Path | None, text: str) -> None:
    if note is not None:
        note.write_text(text)


@contextmanager
def of_ranks(folder: Path) -> Iterator[None]:
    """Replace the traceback of a failed rank with the message in the rank's file.

    Raises:
        RankFailedError: a rank failed.
    """
    try:
        yield
    except RankFailedError as error:
        note = note_of(folder, error.rank)
        if not note.exists():
            raise
        raise RankFailedError(
            f"rank {error.rank}: {note.read_text()}", rank=error.rank, exit_code=error.exit_code
        ) from error


def note_of(folder: Path, rank: int) -> Path:
    """Return the file for the message of a rank."""
    return folder / f"error{rank}.txt"
