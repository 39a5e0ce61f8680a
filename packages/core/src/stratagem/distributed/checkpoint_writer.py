"""CheckpointWriter: saves and loads checkpoints from all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.ranks import Ranks


class CheckpointWriter:
    """Saves, loads, links and removes checkpoints; each method is called by every rank.

    Args:
        ranks: those that save together.
        io: the format.
        reads_parts: whether each rank takes only its part of what was saved in shards: `load` then
            leaves a `LazyTensor` for each such tensor. It is a strategy's `sharded_state`.

    Example:
        >>> import tempfile
        >>> from stratagem import Lite
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> path = tempfile.mkdtemp() + "/last.ckpt"
        >>> lite.checkpoint_writer.save({"epoch": 3}, path)
        >>> lite.checkpoint_writer.load(path)
        {'epoch': 3}
    """

    def __init__(self, ranks: Ranks, io: CheckpointIO, *, reads_parts: bool = False) -> None:
        self.ranks = ranks
        self.io = io
        self.reads_parts = reads_parts

    def save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Save; every rank returns once the checkpoint is durable, or copied to be written."""
        if self.ranks.is_global_zero or self.io.takes_shards:
            self.io.save_checkpoint(checkpoint, path)
        self.ranks.barrier("save_checkpoint")

    def load(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`, after what is still being written.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: see `CheckpointIO.load_checkpoint`.
        """
        self.finish()
        return self.io.open_checkpoint(path) if self.reads_parts else self.io.load_checkpoint(path)

    def finish(self) -> None:
        """Return once everything that any rank has saved is durable."""
        if self.io.asynchronous:
            self.io.wait()
            self.ranks.barrier("finish_saves")

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, on rank 0."""
        if self.ranks.is_global_zero:
            self.io.remove_checkpoint(path)

    def link(self, target: str | Path, path: str | Path) -> bool:
        """Let `path` name the checkpoint at `target` too, once that is durable.

        Returns:
            Whether the format can, on every rank alike; where it cannot, save again.
        """
        linked = self.ranks.is_global_zero and self.io.link_checkpoint(target, path)
        return bool(self.ranks.broadcast(linked))
