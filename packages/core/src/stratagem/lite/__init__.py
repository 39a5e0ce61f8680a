"""Lite: the front end for your own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.lite.dataloader import LiteDataLoader as LiteDataLoader
    from stratagem.lite.lite import Lite as Lite, PathLike as PathLike, numbers_of as numbers_of
    from stratagem.lite.module import LiteModule as LiteModule
    from stratagem.lite.state import collect as collect, restore as restore
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "stratagem.lite.dataloader": "LiteDataLoader",
            "stratagem.lite.lite": "Lite PathLike numbers_of",
            "stratagem.lite.module": "LiteModule",
            "stratagem.lite.state": "collect restore",
        },
    )
