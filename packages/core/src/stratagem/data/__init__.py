"""Loaders of ranks, the order of samples, resuming within an epoch, and nested batches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.data.combined_loader import CombinedLoader as CombinedLoader
    from stratagem.data.pytree import map_tensors as map_tensors
else:
    _MODULES = {
        "CombinedLoader": "stratagem.data.combined_loader",
        "map_tensors": "stratagem.data.pytree",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


__all__ = ["CombinedLoader", "map_tensors"]
