"""Base classes for users: Module and DataModule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.module.datamodule import DataModule as DataModule
    from stratagem.module.hooks import DataHooks as DataHooks, ModuleHooks as ModuleHooks
    from stratagem.module.hyperparameters import (
        HyperParameters as HyperParameters,
        HyperParametersMixin as HyperParametersMixin,
    )
    from stratagem.module.module import Module as Module

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(__name__, None)
