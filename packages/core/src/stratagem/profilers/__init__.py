"""Profilers: where the time of a run goes; each is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from stratagem.profilers.profiler import PassThroughProfiler as PassThroughProfiler
    from stratagem.profilers.profiler import Profiler as Profiler
    from stratagem.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from stratagem.profilers.simple import SimpleProfiler as SimpleProfiler
else:
    _HOMES = {
        "AdvancedProfiler": "advanced",
        "PassThroughProfiler": "profiler",
        "Profiler": "profiler",
        "PyTorchProfiler": "pytorch",
        "SimpleProfiler": "simple",
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
]
