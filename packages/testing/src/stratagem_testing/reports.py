"""What a check is called, what it means, and what is said when it fails: alike in every kit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_TORCHS_REFUSAL = re.compile(r"Weights only load failed\b.*?(?:torch\.load\.html\.|\Z)", re.DOTALL)
_REFUSED = re.compile(r"GLOBAL ([\w.]+\w)")


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
    """Return the message of a failed check: its name, the defect, and the meaning.

    Example:
        >>> said = failure_of("save", "Weights only load failed. GLOBAL mine.Clock was not", "")
        >>> said.partition(").")[0]
        'save: torch refuses to make all of it (the file names mine.Clock'
    """
    # pytest adds the expressions of the kit's own assertions, of which the text says everything.
    what = what.partition("\nassert ")[0]
    return f"{name}: {_TORCHS_REFUSAL.sub(_other_advice, what)}\n({about})"


def _other_advice(refusal: re.Match[str]) -> str:
    """Return what to say for torch's refusal of a pickle, whose advice is to execute it."""
    found = _REFUSED.search(refusal[0])
    named = f"the file names {found[1]}" if found else "the file is another pickle"
    return (
        f"torch refuses to make all of it ({named}). Keep weights_only=True, without which a "
        "checkpoint executes what it says: save tensors and weights-only-safe data alone, build "
        "objects from them in load_state_dict, and where a format reads a file, raise "
        "CheckpointCorruptError from torch's UnpicklingError"
    )
