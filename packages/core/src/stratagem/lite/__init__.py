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
            "Lite": "stratagem.lite.lite",
            "LiteDataLoader": "stratagem.lite.dataloader",
            "LiteModule": "stratagem.lite.module",
            "PathLike": "stratagem.lite.lite",
            "collect": "stratagem.lite.state",
            "numbers_of": "stratagem.lite.lite",
            "restore": "stratagem.lite.state",
        },
    )
