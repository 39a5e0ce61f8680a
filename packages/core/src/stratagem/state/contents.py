"""What may be in a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.errors import CheckpointContentError
from stratagem.state.plain_data import find_culprit, find_oversized


def why_refused(contents: Any) -> str:
    """Return what could not be loaded again without executing code, or only by much more memory.

    Returns:
        Where it is, and what to store in its place; "": all of it may be saved.
    """
    if culprit := find_culprit(contents, "checkpoint"):
        return (
            f"{culprit}, which could not be loaded without executing code. "
            "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
        )
    if oversized := find_oversized(contents, "checkpoint"):
        return f"{oversized}. Store the tensor before it was expanded"
    return ""


def check_contents(checkpoint: Any, path: str | Path) -> None:
    """Refuse what `why_refused` says.

    Raises:
        CheckpointContentError: says where it is.
    """
    if why := why_refused(checkpoint):
        raise CheckpointContentError(f"cannot save {path}: {why}")
