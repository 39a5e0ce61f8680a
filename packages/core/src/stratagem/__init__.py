"""Stratagem: train any PyTorch model with any strategy, selected by name.

Importing this loads neither torch nor a backend: each public name is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.lazy import lazy_names

__version__ = "0.1.0"
"""The version, which is the same for all distributions of Stratagem."""

if TYPE_CHECKING:
    from stratagem.callbacks import Callback as Callback
    from stratagem.discovery.registry import StrategyRegistry as StrategyRegistry
    from stratagem.lite.lite import Lite as Lite
    from stratagem.module import DataModule as DataModule, Module as Module
    from stratagem.rng import seed_everything as seed_everything
    from stratagem.trainer import Trainer as Trainer

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    _find, _, _NAMES = lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return _find(name)
        # A name that an installed distribution adds, such as Tuner.
        from stratagem.discovery.exports import exporter

        return exporter(__name__, None)[0](name)


__all__ = [
    "Callback",
    "DataModule",
    "Lite",
    "Module",
    "StrategyRegistry",
    "Trainer",
    "__version__",
    "seed_everything",
]


def __dir__() -> list[str]:
    return sorted(__all__)
