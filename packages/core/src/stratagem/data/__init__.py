"""Loaders of ranks, the order of samples, and resuming within an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.data.combined_loader import CombinedLoader as CombinedLoader
else:

    def __getattr__(name: str) -> Any:
        if name != "CombinedLoader":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from stratagem.data.combined_loader import CombinedLoader

        return CombinedLoader


__all__ = ["CombinedLoader"]
