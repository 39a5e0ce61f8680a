"""CheckpointIO: the storage of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.discovery.former import with_former_names
from stratagem.interfaces.ranks import Ranks

if TYPE_CHECKING:
    from stratagem.interfaces.accelerator import Accelerator


@with_former_names
class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints.

    Call sequence:
        1. `bind` in the process that the user started, then `setup` on every rank, once the ranks
           can communicate.
        2. `save_checkpoint` on rank 0 only, after the strategy has gathered the state; the other
           ranks wait until it returns. If `supports_shards`, on every rank. With
           `async_save=True`, `prepare_save` instead; the function that it returns runs in a thread.
        3. `load_checkpoint` on every rank; a strategy that needs only parts of the checkpoint calls
           `open_checkpoint` instead.
        4. `verify_checkpoint`, `remove_checkpoint`, `link_checkpoint` and `when_durable` on rank 0
           only.
        5. If `asynchronous`: `raise_errors` on every rank before a training step, and `wait` on
           every rank at the end of a run. If the run ends with an error, `wait_at_error`. If a rank
           is lost, `rank_was_lost` on the remaining ranks.
        6. `teardown` on every rank, at the end.

    A path is a local path or a URL that fsspec supports ("s3://bucket/run/last.ckpt"), as `str` or
    `Path`.

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
    """Whether every rank writes its part of the state. Sharding strategies then put `Shards` into a
    checkpoint, instead of whole tensors on rank 0."""

    asynchronous: bool = False
    """Whether `save_checkpoint` returns before the checkpoint is durable. It waits for the save
    before, so that only one is under way."""

    ranks: Ranks | None = None
    """The ranks that save together; None before `setup`, and in a process that works alone."""

    strategy_name: str | None = None
    """The name of the strategy, for a checkpoint's manifest; None before `setup`."""

    def bind(self, accelerator: Accelerator) -> None:
        """Set the accelerator of the saved tensors; called once before each launch."""

    def setup(self, ranks: Ranks, strategy_name: str) -> None:
        """Set the ranks that save together, and the name of their strategy."""
        self.ranks = ranks
        self.strategy_name = strategy_name

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` to `path` atomically.

        If the write fails, `path` keeps its previous contents.

        Raises:
            CheckpointContentError: the checkpoint contains an object that is not weights-only-safe.
            CheckpointSaveError: the storage rejected the write.
        """

    def prepare_save(self, checkpoint: dict[str, Any], path: str | Path) -> Callable[[], None]:
        """Run the part of a save that communicates; return a function that does the rest.

        An asynchronous save calls this method before training continues, and the function in
        another thread during training. The function must not communicate: neither it nor the
        training ranks may wait for the other.
        """
        return partial(self.save_checkpoint, checkpoint, path)

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path` with tensors on the CPU, without executing code in it.

        Raises:
            CheckpointNotFoundError: `path` does not exist.
            CheckpointCorruptError: the checkpoint is damaged or unsafe to load.
        """

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path` with a `LazyTensor` for each sharded tensor.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint` does.
        """
        return self.load_checkpoint(path)

    def verify_checkpoint(self, path: str | Path) -> None:
        """Check that the checkpoint at `path` is complete and undamaged; by default, load it.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint` does.
        """
        self.load_checkpoint(path)

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at `path`, if it exists, after all pending writes."""

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        """Make `path` a second name of the checkpoint at `target`, once that is durable.

        Returns:
            True if the link is made; False if the format has no links, so that the caller must
            save a second time.
        """
        return False

    def when_durable(self, action: Callable[[], None]) -> None:
        """Call a function once all saved checkpoints are durable; if a write fails, never."""
        action()

    def raise_errors(self) -> None:
        """Raise the error of a background write, if one has failed, without waiting."""

    def wait(self) -> None:
        """Wait until all saved checkpoints are durable; raise the error of a failed write."""

    def wait_at_error(self) -> None:
        """Wait as `wait` does, at the end of a run with an error, when other ranks may be gone."""

    def rank_was_lost(self) -> None:
        """Make background writes fail instead of waiting for other ranks."""

    def teardown(self) -> None:
        """Finish pending writes, and raise the error of a failed one."""
