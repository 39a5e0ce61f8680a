"""What libraries call before they read a checkpoint of an older Lightning."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from stratagem.errors import CheckpointMismatchError, format_value
from stratagem_lightning.api.utilities.version import LIGHTNING_VERSION
from stratagem_lightning_plugin.checkpoint_format import MARK


class pl_legacy_patch(nullcontext[None]):  # Lightning's name
    """A context that changes nothing.

    In Lightning, old classes exist within it, because pickled checkpoints name them. Here no
    checkpoint may name a class.

    Example:
        >>> from stratagem_lightning.api.utilities.migration import pl_legacy_patch
        >>> with pl_legacy_patch():
        ...     pass
    """


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a checkpoint of Lightning 2.x unchanged, and an empty dict of changes.

    Args:
        checkpoint: the return value of `torch.load`.
        target_version: ignored.

    Raises:
        CheckpointMismatchError: the checkpoint was not written by Lightning 2.x.

    Example:
        >>> from stratagem_lightning.api.utilities.migration import migrate_checkpoint
        >>> migrate_checkpoint({"pytorch-lightning_version": "2.1.0", "state_dict": {}})
        ({'pytorch-lightning_version': '2.6.6', 'state_dict': {}}, {})
    """
    version = checkpoint.get(MARK)
    if not str(version).startswith("2."):
        raise CheckpointMismatchError(
            f"migrate_checkpoint: expected a checkpoint of Lightning 2.x, received one with "
            f"{MARK}={format_value(version)}: upgrade it by `python -m "
            "lightning.pytorch.utilities.upgrade_checkpoint` where Lightning is installed"
        )
    checkpoint[MARK] = LIGHTNING_VERSION
    return checkpoint, {}
