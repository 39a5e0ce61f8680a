"""What a check is called, what it means, and what is said when it fails: alike in every kit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def sentence_of(function: Callable[..., Any]) -> str:
    """Return a docstring as one line.

    Example:
        >>> def check():
        ...     '''What is
        ...     expected.'''
        >>> sentence_of(check)
        'What is expected.'
    """
    return " ".join((inspect.getdoc(function) or "").split())


def failure_of(name: str, what: str, about: str) -> str:
    """Return what is said of a check that failed: its name, what is wrong, and what it means."""
    return f"{name}: {what}\n({about})"
