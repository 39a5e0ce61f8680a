"""Stratagem: train any PyTorch model with any strategy, selected by name.

Importing this loads neither torch nor a backend: each public name is imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem._version import __version__

if TYPE_CHECKING:
    from stratagem.callbacks import Callback as Callback
    from stratagem.datamodule import DataModule as DataModule
    from stratagem.discovery.strategy_registry import StrategyRegistry as StrategyRegistry
    from stratagem.lite.lite import Lite as Lite
    from stratagem.module import Module as Module
    from stratagem.rng import seed_everything as seed_everything
    from stratagem.trainer import Trainer as Trainer
    from stratagem.tuner import Tuner as Tuner
else:
    _HOMES = {
        "Callback": "stratagem.callbacks",
        "DataModule": "stratagem.datamodule",
        "Lite": "stratagem.lite.lite",
        "Module": "stratagem.module",
        "StrategyRegistry": "stratagem.discovery.strategy_registry",
        "Trainer": "stratagem.trainer",
        "Tuner": "stratagem.tuner",
        "seed_everything": "stratagem.rng",
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


__all__ = [
    "Callback",
    "DataModule",
    "Lite",
    "Module",
    "StrategyRegistry",
    "Trainer",
    "Tuner",
    "__version__",
    "seed_everything",
]


def __dir__() -> list[str]:
    return sorted(__all__)
