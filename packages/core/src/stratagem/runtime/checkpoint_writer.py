"""CheckpointWriter: saves and loads checkpoints from all ranks together, and their contents."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
        ranks: the ranks that save together.
        io: the format.
        supports_shards: whether each rank loads only its part of sharded tensors: `load` then
            leaves a `LazyTensor` for each such tensor. Equals the `sharded_state` of a strategy.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO
        >>> from stratagem.strategies import Ranks
        >>> path = tempfile.mkdtemp() + "/last.ckpt"
        >>> writer = CheckpointWriter(Ranks(), SingleFileCheckpointIO())
        >>> writer.save({"epoch": 3}, path)
        >>> writer.load(path)
        {'epoch': 3}
    """

    def __init__(self, ranks: Ranks, io: CheckpointIO, *, supports_shards: bool = False) -> None:
        self.ranks = ranks
        self.io = io
        self.supports_shards = supports_shards

    def save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Save; every rank returns once the checkpoint is durable, or copied to be written."""
        if self.ranks.is_global_zero or self.io.supports_shards:
            self.io.save_checkpoint(checkpoint, path)
        self.ranks.barrier("save_checkpoint")

    def load(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`, after pending writes are finished.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: see `CheckpointIO.load_checkpoint`.
        """
        self.finish()
        return (
            self.io.open_checkpoint(path) if self.supports_shards else self.io.load_checkpoint(path)
        )

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


# -- a strategy's part of a checkpoint, under both front ends


def model_state(strategy: Strategy, prepared: PreparedModel) -> dict[str, Any]:
    """Return the model state for saving; called by every rank.

    Raises:
        PluginError: the ranks returned an incomplete model, or different names.
    """
    state = strategy.model_state(prepared)
    kind, ranks = type(strategy), strategy.ranks
    if not isinstance(state, dict):
        raise PluginError(
            f"{kind.__name__}.model_state returned a {type(state).__name__}; expected a dict of "
            "tensors by name ({} on ranks that leave saving to rank 0)"
        )
    missing: list[str] = []
    if kind.model_state is not Strategy.model_state:
        missing = _compared_with_the_model(strategy, prepared, state)
    if ranks.world_size > 1:
        missing = _compared_with_other_ranks(strategy, state, missing)
    if missing:
        raise PluginError(
            f"{kind.__name__}.model_state lacks {len(missing)} of the model's names on every rank, "
            f"such as {missing[0]!r}: return all of them, under the names of "
            "prepared.original.state_dict()"
        )
    return state


def _compared_with_the_model(
    strategy: Strategy, prepared: PreparedModel, state: Mapping[str, Any]
) -> list[str]:
    """Return the names of the model's tensors that a state lacks.

    Raises:
        PluginError: an unsharded tensor has another shape than the tensor of a model with undivided
            parameters: this rank's part of a tensor would be saved as the complete tensor.
    """
    whole = prepared.original.state_dict()
    divided = strategy.capabilities.parameters == "divided"
    for name, value in whole.items():
        saved: Any = state.get(name)
        # An engine may keep an empty tensor in a parameter's place, and return one where rank 0
        # has the whole.
        is_compared = not divided and isinstance(saved, Tensor) and isinstance(value, Tensor)
        if is_compared and min(saved.numel(), value.numel()) and saved.shape != value.shape:
            raise PluginError(
                f"{type(strategy).__name__}.model_state returned {name!r} with the shape "
                f"{tuple(saved.shape)}, and the model's has {tuple(value.shape)}: return whole "
                "tensors, or Shards of what a rank holds a part of"
            )
    return [name for name in whole if name not in state]


def _compared_with_other_ranks(
    strategy: Strategy, state: Mapping[str, Any], missing: list[str]
) -> list[str]:
    """Return the names that are missing on every rank.

    Raises:
        PluginError: ranks returned different names, so the checkpoint would lack some tensors.
    """
    ranks = strategy.ranks
    # Every rank may hold other shards; rank 0 alone writes unsharded values.
    names = sorted(name for name, value in state.items() if not isinstance(value, Shards))
    # A hash, so that the ranks exchange 24 bytes each and not the names.
    numbers = [len(names), zlib.crc32("\n".join(names).encode()), len(missing)]
    of_ranks = ranks.all_gather(torch.tensor(numbers, dtype=torch.int64)).tolist()
    differing = [r for r, (*own, _) in enumerate(of_ranks) if own[0] and own != of_ranks[0][:2]]
    if differing:
        gathered, rank = ranks.gather_objects(names), differing[0]
        apart = sorted(set(gathered[rank]) ^ set(gathered[0]))
        raise PluginError(
            f"{type(strategy).__name__}.model_state returned {len(gathered[0])} whole tensors on "
            f"rank 0 and {len(gathered[rank])} others on rank {rank} ({apart[0]!r} is on one of "
            "them only), and rank 0's alone would be saved: return the same names on every rank, "
            "Shards of what a rank holds a part of (where checkpoint_io.supports_shards), or "
            "gather all on rank 0 and return {} elsewhere"
        )
    if not all(lacking for *_, lacking in of_ranks):
        return []
    everywhere = set(missing).intersection(*ranks.gather_objects(missing))
    return [name for name in missing if name in everywhere]


def nonfinite_weights(strategy: Strategy, prepared: PreparedModel, state: Mapping[str, Any]) -> str:
    """Return the name of a tensor of a model's state that is not finite on some rank, or "".

    Called by every rank, with what `model_state` returned there; all hear of the same name.
    """
    trained = {name for name, p in prepared.original.named_parameters() if p.requires_grad}
    name, ranks = first_nonfinite(state, trained), strategy.ranks
    if ranks.world_size == 1:
        return name
    # A number each: which rank has found one, counted from 1.
    who = torch.tensor(ranks.global_rank + 1 if name else 0)
    found = int(ranks.all_reduce(who, "max"))
    return str(ranks.broadcast(name, src=found - 1)) if found else ""


def strategy_state(
    strategy: Strategy, prepared: PreparedModel, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return a strategy's own state by its class name; an empty dict if it has no state."""
    state = strategy.state(prepared, optimizers)
    return {type(strategy).__name__: state} if state else {}


def load_strategy_state(
    strategy: Strategy,
    prepared: PreparedModel,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, Any],
) -> None:
    """Load a state from `strategy_state` if the strategy has the same class."""
    state = saved.get(type(strategy).__name__)
    if state is not None:
        strategy.load_state(prepared, optimizers, state)


_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def first_nonfinite(state: Mapping[str, Any], trained: Set[str]) -> str:
    """Return the name of the first tensor that training has made invalid, or "".

    A tensor is invalid if it contains NaN. An infinity is invalid in trained tensors only: a buffer
    may hold infinities for good reasons, such as a causal mask. Each tensor is read once on its
    device, which takes half the time of a copy; the host waits for a device twice for each dtype.

    Args:
        state: tensors or `Shards` by name; other values are skipped.
        trained: names of the tensors that the optimizer changes.

    Example:
        >>> import torch
        >>> from stratagem.runtime.checkpoint_writer import first_nonfinite
        >>> mask = torch.tensor([0.0, -torch.inf])
        >>> first_nonfinite({"mask": mask, "weight": torch.ones(2)}, {"weight"})
        ''
        >>> first_nonfinite({"mask": mask, "weight": mask}, {"weight"})
        'weight'
    """
    extremes: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
    for name, value in state.items():
        for tensor in _tensors(value):
            low, high = torch.aminmax(tensor)  # of a tensor with NaN, both are NaN
            extremes.setdefault((tensor.device, tensor.dtype), []).append((name, low, high))
    broken: set[str] = set()
    for of_kind in extremes.values():
        names, lows, highs = zip(*of_kind, strict=True)
        low, high = torch.stack(lows), torch.stack(highs)
        nan, infinite = low.isnan().tolist(), (low.isinf() | high.isinf()).tolist()
        broken.update(name for name, is_nan in zip(names, nan, strict=True) if is_nan)
        infinities = {name for name, is_inf in zip(names, infinite, strict=True) if is_inf}
        broken.update(trained & infinities)
    return next((name for name in state if name in broken), "")


def _tensors(value: Any) -> Iterator[Tensor]:
    for tensor in [chunk for _, chunk in value.chunks] if isinstance(value, Shards) else [value]:
        # A subclass may hold its values in any form.
        is_read = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in _DTYPES
        if is_read and tensor.numel() and tensor.device.type != "meta":
            yield tensor.detach()
