"""Preparing a model: what both front ends do around `Strategy.prepare`."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from stratagem.errors import PluginError
from stratagem.interfaces.prepared_model import Optimizers, PreparedModel
from stratagem.interfaces.step_module import StepModule
from stratagem.interfaces.strategy import Strategy

_latest: WeakKeyDictionary[nn.Module, tuple[ref[Strategy], ref[PreparedModel]]] = (
    WeakKeyDictionary()
)
"""What each module was prepared as last, in this process."""


def prepare(
    strategy: Strategy,
    module: nn.Module,
    optimizers: Optimizers = (),
    *,
    move_to_device: bool = True,
) -> PreparedModel:
    """Return a model as a strategy runs it; what was prepared of it before is released.

    Args:
        strategy: of a launched run.
        module: the user's.
        optimizers, move_to_device: see `Strategy.prepare`.

    Raises:
        PluginError: the strategy has returned something else.
    """
    earlier_strategy, earlier = (one() for one in _latest.pop(module, (_nothing, _nothing)))
    if isinstance(earlier_strategy, Strategy) and isinstance(earlier, PreparedModel):
        earlier_strategy.release(earlier)
    step_module = StepModule(module)
    if strategy.sync_batchnorm:
        strategy.synchronize_batch_norm(step_module)
    prepared: Any = strategy.prepare(step_module, optimizers, move_to_device=move_to_device)
    if not isinstance(prepared, PreparedModel):
        raise PluginError(
            f"{type(strategy).__name__}.prepare returned a {type(prepared).__name__}; expected a "
            "PreparedModel(module, original, optimizers, evaluation_module), as super().prepare "
            "returns: what is to be called instead of the model belongs into its `module`"
        )
    _latest[module] = ref(strategy), ref(prepared)
    return prepared


def _nothing() -> None:
    return None
