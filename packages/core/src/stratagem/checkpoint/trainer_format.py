"""The format of a Trainer's checkpoint: its version, and whether a dict is one."""

from __future__ import annotations

from typing import Any

from stratagem._version import __version__
from stratagem.errors import CheckpointCorruptError, CheckpointMismatchError
from stratagem.storage import paths

FORMAT_VERSION = 2
"""Of the table of keys in `stratagem.trainer.resume.checkpoint`."""


def check(checkpoint: dict[str, Any], path: paths.Location | str) -> dict[str, Any]:
    """Return a Trainer's checkpoint; refuse what is none.

    Raises:
        CheckpointCorruptError: it is of another format version.
        CheckpointMismatchError: it has no weights.
    """
    version = checkpoint.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        advice = "upgrade stratagem-core" if version > FORMAT_VERSION else "no release wrote it"
        raise CheckpointCorruptError(
            f"{str(path)!r} has format version {version}, made by stratagem "
            f"{checkpoint.get('stratagem_version')}; this is stratagem {__version__}, which reads "
            f"version {FORMAT_VERSION}: {advice}"
        )
    if "state_dict" not in checkpoint:
        raise CheckpointMismatchError(
            f"{str(path)!r} has no 'state_dict'; it has {', '.join(map(str, checkpoint))}: "
            "expected a checkpoint that a Trainer saved (one of Lite's is loaded with Lite.load)"
        )
    return checkpoint
