"""Profilers of core and of installed distributions; each is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.profilers.profiler import (
        PassThroughProfiler as PassThroughProfiler,
        Profiler as Profiler,
    )

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(__name__, "profiler")
