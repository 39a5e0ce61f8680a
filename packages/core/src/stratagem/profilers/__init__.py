"""Profilers: where the time of a run goes; each is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from stratagem.profilers.profiler import PassThroughProfiler as PassThroughProfiler
    from stratagem.profilers.profiler import Profiler as Profiler
    from stratagem.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from stratagem.profilers.simple import SimpleProfiler as SimpleProfiler
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "AdvancedProfiler": ".advanced",
            "PassThroughProfiler": ".profiler",
            "Profiler": ".profiler",
            "PyTorchProfiler": ".pytorch",
            "SimpleProfiler": ".simple",
        },
    )


__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
]


def __dir__() -> list[str]:
    return sorted(__all__)
