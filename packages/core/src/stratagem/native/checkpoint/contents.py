"""What may be in a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem._plain_data import find_culprit, find_oversized
from stratagem.errors import CheckpointContentError


def check_contents(checkpoint: Any, path: str | Path) -> None:
    """Refuse what could not be loaded again without executing code, or only by much more memory.

    Raises:
        CheckpointContentError: says where it is.
    """
    if culprit := find_culprit(checkpoint, "checkpoint"):
        raise CheckpointContentError(
            f"cannot save {path}: {culprit}, which could not be loaded without executing code. "
            "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
        )
    if oversized := find_oversized(checkpoint, "checkpoint"):
        raise CheckpointContentError(
            f"cannot save {path}: {oversized}. Store the tensor before it was expanded"
        )
