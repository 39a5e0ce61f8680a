"""Convert a user's dict to a checkpoint for `Lite.save`, and restore the dict for `Lite.load`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch.optim.lr_scheduler import LRScheduler

from stratagem.errors import CheckpointMismatchError, format_names, naming
from stratagem.interfaces.strategy import Strategy
from stratagem.lite.dataloader import FORM as LOADER_FORM, LiteDataLoader
from stratagem.lite.module import LiteModule
from stratagem.runtime.checkpoint_writer import load_strategy_state, model_state, strategy_state
from stratagem.runtime.optimizer import LiteOptimizer
from stratagem.state.rank_states import RankStates, gather_states
from stratagem.state.shards import read_whole
from stratagem.state.state_checks import as_mismatch, load_scheduler_state

STRATEGY_STATE = "stratagem.strategy_state"
"""The entry for the strategy's own state of each model, by the model's name in the dict."""


PRECISION_STATE = "stratagem.precision_state"
"""The entry for the precision's state, such as the loss scale, if it has a state."""


class SetUpObjects:
    """Everything that a Lite has set up, by kind and number: "model0", "optimizer0", ..."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        # A loader that the user has dropped is not read again; its workers should end.
        self._loaders: WeakValueDictionary[str, LiteDataLoader] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()

    def __reduce__(self) -> tuple[type[SetUpObjects], tuple[()]]:
        # A rank started with a copy of the Lite sets up its own objects.
        return SetUpObjects, ()

    def add(self, kind: str, *objects: Any) -> None:
        """Store objects under the next numbers of their kind."""
        for one in objects:
            kept: Any = self._loaders if isinstance(one, LiteDataLoader) else self._kept
            kept[f"{kind}{self._counts[kind]}"] = one
            self._counts[kind] += 1

    def state(self) -> dict[str, Any]:
        """Return the objects by name, in the form for `Lite.save` and `Lite.load`."""
        return {**self._kept, **self._loaders}

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the objects of a type."""
        return [one for one in self._kept.values() if isinstance(one, kind)]


def collect(strategy: Strategy, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of the objects in the user's dict; called by every rank."""
    checkpoint = {name: _state_of(strategy, value) for name, value in state.items()}
    own = {
        name: found
        for name, value in state.items()
        if isinstance(value, LiteModule)
        and (found := strategy_state(strategy, value.prepared, value.prepared.optimizers))
    }
    if own:
        checkpoint[STRATEGY_STATE] = own
    # The loss scale is saved with optimizers; weights alone do not need it.
    if any(isinstance(value, LiteOptimizer) for value in state.values()) and (
        scale := strategy.precision.state_dict()
    ):
        checkpoint[PRECISION_STATE] = scale
    return checkpoint


def _state_of(strategy: Strategy, value: Any) -> Any:
    if isinstance(value, LiteModule):
        return model_state(strategy, value.prepared)
    if isinstance(value, LiteOptimizer):
        return strategy.optimizer_state(value.prepared, value.optimizer)
    if isinstance(value, LiteDataLoader):
        return gather_states(strategy.ranks, value.state_dict())
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return value


def restore(
    strategy: Strategy,
    checkpoint: dict[str, Any],
    state: dict[str, Any],
    *,
    path: str | os.PathLike[str],
    strict: bool,
) -> None:
    """Restore the objects in the user's dict, and remove their entries from `checkpoint`.

    Called by every rank. The order does not depend on the dict: models, then optimizers (some
    strategies lay out an optimizer's state by the model's), then other objects, and the strategy's
    own state last.

    Raises:
        CheckpointMismatchError: an entry is missing, or belongs to another model.
    """
    own = checkpoint.pop(STRATEGY_STATE, {})
    scale = checkpoint.pop(PRECISION_STATE, {})
    missing = [name for name in state if name not in checkpoint]
    if missing and strict:
        raise CheckpointMismatchError(
            f"{os.fspath(path)!r} lacks the entries {', '.join(missing)}; it has "
            f"{format_names(checkpoint, 20)}. Pass strict=False to leave them as they are"
        )
    there = {name: target for name, target in state.items() if name not in missing}
    for name, target in sorted(there.items(), key=lambda item: _turn(item[1])):
        value = checkpoint.pop(name)
        if isinstance(target, LiteModule):
            with naming(path):
                strategy.load_model_state(target.prepared, value, strict=strict)
        elif isinstance(target, LiteOptimizer):
            with naming(path):
                strategy.load_optimizer_state(target.prepared, target.optimizer, value)
        elif isinstance(target, LiteDataLoader):
            with naming(path), as_mismatch("a loader"):
                target.resume(RankStates(value, LOADER_FORM))
        elif isinstance(target, LRScheduler):
            with naming(path):
                load_scheduler_state(target, read_whole(value))
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(read_whole(value))
        else:
            state[name] = read_whole(value)
    if scale and any(isinstance(target, LiteOptimizer) for target in there.values()):
        strategy.precision.load_state_dict(scale)
    for name, target in there.items():
        if isinstance(target, LiteModule) and name in own:
            prepared = target.prepared
            load_strategy_state(strategy, prepared, prepared.optimizers, own[name])


def _turn(target: Any) -> int:
    """Return an object's turn to be loaded; objects with the same turn keep the dict's order."""
    if isinstance(target, LiteModule):
        return 0
    return 1 if isinstance(target, LiteOptimizer) else 2
