"""What Lite saves of each entry of the user's state, and how it fills it again."""

from __future__ import annotations

from typing import Any

from stratagem.interfaces.strategy import Strategy
from stratagem.lite.dataloader import LiteDataLoader
from stratagem.lite.module import LiteModule
from stratagem.lite.optimizer import LiteOptimizer
from stratagem.state.shards import read_whole


def state_of(value: Any, strategy: Strategy) -> Any:
    """Return what a checkpoint holds of an entry; called on every rank."""
    if isinstance(value, LiteModule):
        return strategy.model_state(value.prepared)
    if isinstance(value, LiteOptimizer):
        return strategy.optimizer_state(value.prepared, value.optimizer)
    if isinstance(value, LiteDataLoader):
        return strategy.ranks.gather_plain(value.state_dict())
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value


def fill(target: Any, saved: Any, strategy: Strategy, *, strict: bool) -> Any:
    """Fill an entry with what `state_of` returned; return what stands in its place afterwards.

    Args:
        target: the entry; what has no state of its own is replaced.
        saved: of the checkpoint.
        strategy: whose models and optimizers they are.
        strict: refuse weights that do not match the model's.
    """
    if isinstance(target, LiteModule):
        strategy.load_model_state(target.prepared, saved, strict=strict)
    elif isinstance(target, LiteOptimizer):
        strategy.load_optimizer_state(target.prepared, target.optimizer, saved)
    elif isinstance(target, LiteDataLoader):
        target.resume(saved)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(read_whole(saved))
    else:
        return read_whole(saved)
    return target
