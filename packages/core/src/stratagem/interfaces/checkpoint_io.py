"""CheckpointIO: how a checkpoint's data get to storage and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.interfaces.ranks import Ranks

if TYPE_CHECKING:
    from stratagem.interfaces.accelerator import Accelerator


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints.

    Who calls, and when:
        1. `bind` in the process that the user started, then `setup` on every rank, once the ranks
           can communicate.
        2. `save_checkpoint` on rank 0 only, after the strategy has gathered the state; the other
           ranks wait until it returns. Where `supports_shards`, on every rank. With
           `async_save=True` `prepare_save` in its place, and what that returns in a thread.
        3. `load_checkpoint` on every rank; `open_checkpoint` in its place, by a strategy that needs
           only parts of it.
        4. `verify_checkpoint`, `remove_checkpoint`, `link_checkpoint` and `when_durable` on rank 0
           only.
        5. Where `asynchronous`: `raise_errors` on every rank, before a training step; `wait` on
           every rank, at the end of a run; `wait_at_error`, if it ends with an error;
           `rank_was_lost` on the ranks that are left, if another one is gone.
        6. `teardown` on every rank, at the end.

    Paths are local, or URLs that fsspec knows ("s3://bucket/run/last.ckpt"), as `str` or `Path`.

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

    supports_shards: bool = False
    """Whether every rank hands over its part of the state, and writes it: strategies that shard
    then put `Shards` into a checkpoint, in the place of whole tensors on rank 0."""

    asynchronous: bool = False
    """Whether `save_checkpoint` returns before the checkpoint is durable. It waits for the save
    before, so that only one is under way."""

    ranks: Ranks | None = None
    """The ranks that save together; None before `setup`, and where one process works alone."""

    strategy_name: str | None = None
    """The name of the strategy that saves, for a manifest; None before `setup`."""

    def bind(self, accelerator: Accelerator) -> None:
        """Take the accelerator whose tensors are saved; once before each launch."""

    def setup(self, ranks: Ranks, strategy_name: str) -> None:
        """Take note of who saves together."""
        self.ranks = ranks
        self.strategy_name = strategy_name

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` so that `path` holds it whole or holds what was there before.

        Raises:
            CheckpointContentError: something in it is not weights-only-safe data.
            CheckpointSaveError: storage refused it.
        """

    def prepare_save(self, checkpoint: dict[str, Any], path: str | Path) -> Callable[[], None]:
        """Do what of a save needs other ranks; return the rest, which may run in another thread.

        An asynchronous save calls this before training goes on, and the rest beside it. The rest
        communicates nothing: the ranks that train must not wait for it, nor it for them.
        """
        return partial(self.save_checkpoint, checkpoint, path)

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on the CPU; execute nothing in it.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CheckpointCorruptError: it is damaged, or not safe to load.
        """

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path` with a `LazyTensor` for each tensor that was sharded.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint` does.
        """
        return self.load_checkpoint(path)

    def verify_checkpoint(self, path: str | Path) -> None:
        """Return if the checkpoint at `path` is whole; loads it, unless a format knows better.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint` does.
        """
        self.load_checkpoint(path)

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at `path`, if there is one; after what is still being written."""

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        """Let `path` name the checkpoint at `target` too, once that is durable.

        Returns:
            False: this format cannot; save a second time.
        """
        return False

    def when_durable(self, action: Callable[[], None]) -> None:
        """Call a function once everything that was saved is durable, and not if that fails."""
        action()

    def raise_errors(self) -> None:
        """Raise the error of a write in the background, if there was one; wait for nothing."""

    def wait(self) -> None:
        """Return once everything that was saved is durable; raise what went wrong."""

    def wait_at_error(self) -> None:
        """Do as `wait`, in a run that ends with an error: other ranks may be gone."""

    def rank_was_lost(self) -> None:
        """Let no write in the background wait for other ranks any longer: it fails instead."""

    def teardown(self) -> None:
        """Finish what is still being written, and raise what went wrong in it."""
