"""CheckpointIO: how a checkpoint's data get to storage and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints.

    Who calls, and when:
        1. `save_checkpoint` on rank 0 only, after the strategy has gathered the state; the other
           ranks wait until it returns.
        2. `load_checkpoint` on every rank.
        3. `remove_checkpoint` on rank 0 only.
        4. `teardown` on every rank, at the end.

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import CheckpointIO
        >>> class InMemory(CheckpointIO):
        ...     def __init__(self):
        ...         self.saved = {}
        ...     def save_checkpoint(self, checkpoint, path):
        ...         self.saved[str(path)] = checkpoint
        ...     def load_checkpoint(self, path):
        ...         return dict(self.saved[str(path)])
        ...     def remove_checkpoint(self, path):
        ...         self.saved.pop(str(path), None)
        >>> lite = Lite(accelerator="cpu", plugins=InMemory())
        >>> lite.launch()
        >>> lite.save("a", {"epoch": 3})
        >>> lite.load("a")
        {'epoch': 3}
    """

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` so that `path` holds it whole or holds what was there before.

        Raises:
            CheckpointContentError: something in it is not plain data.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on the CPU; execute nothing in it.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CheckpointCorruptError: it is damaged, or not safe to load.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at `path`, if there is one."""

    def teardown(self) -> None:
        """Finish what is still being written."""
