"""CheckpointWriter: saves and loads checkpoints from all ranks together, and their contents."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from stratagem.errors import PluginError
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.ranks import Ranks
from stratagem.interfaces.strategy import Strategy
from stratagem.state.shards import Shards


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


# -- what a strategy contributes to a checkpoint, under both front ends


def model_state(strategy: Strategy, prepared: PreparedModel) -> dict[str, Any]:
    """Return a model's state to be saved; called by every rank.

    Raises:
        PluginError: ranks returned different names, so that what is saved would lack some.
    """
    state = strategy.model_state(prepared)
    ranks = strategy.ranks
    if ranks.world_size == 1:
        return state
    # Every rank may hold other shards; what is whole, rank 0 alone writes.
    names = sorted(name for name, value in state.items() if not isinstance(value, Shards))
    # A hash, so that the ranks exchange 16 bytes each and not the names.
    own = torch.tensor([len(names), zlib.crc32("\n".join(names).encode())], dtype=torch.int64)
    of_ranks = ranks.all_gather(own).tolist()
    differing = [rank for rank, (count, _) in enumerate(of_ranks) if count]
    if any(of_ranks[rank] != of_ranks[0] for rank in differing):
        gathered = ranks.gather_plain(names)
        rank = next(rank for rank in differing if of_ranks[rank] != of_ranks[0])
        apart = sorted(set(gathered[rank]) ^ set(gathered[0]))
        raise PluginError(
            f"{type(strategy).__name__}.model_state returned {len(gathered[0])} whole tensors on "
            f"rank 0 and {len(gathered[rank])} others on rank {rank} ({apart[0]!r} is on one of "
            "them only), and rank 0's alone would be saved: return the same names on every rank, "
            "Shards of what a rank holds a part of (where checkpoint_io.takes_shards), or gather "
            "all on rank 0 and return {} elsewhere"
        )
    return state


def strategy_state(
    strategy: Strategy, prepared: PreparedModel, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return a strategy's own state under its class's name; {} where it has none."""
    state = strategy.state(prepared, optimizers)
    return {type(strategy).__name__: state} if state else {}


def load_strategy_state(
    strategy: Strategy,
    prepared: PreparedModel,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, Any],
) -> None:
    """Load what `strategy_state` returned under a strategy of the same class."""
    state = saved.get(type(strategy).__name__)
    if state is not None:
        strategy.load_state(prepared, optimizers, state)
