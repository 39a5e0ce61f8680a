"""Stratagem: train any PyTorch model with any strategy, selected by name.

Importing this loads neither torch nor a backend: each public name is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

__version__ = "0.1.0"
"""The version, which is one for the five distributions."""

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
    __getattr__ = lazy_names(
        __name__,
        {
            "Callback": "stratagem.callbacks",
            "DataModule": "stratagem.datamodule",
            "Lite": "stratagem.lite.lite",
            "Module": "stratagem.module",
            "StrategyRegistry": "stratagem.discovery.strategy_registry",
            "Trainer": "stratagem.trainer",
            "Tuner": "stratagem.tuner",
            "seed_everything": "stratagem.rng",
        },
    )


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
