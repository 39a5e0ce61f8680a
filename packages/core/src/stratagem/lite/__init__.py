"""Lite: the front end for your own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.lite.dataloader import LiteDataLoader as LiteDataLoader
    from stratagem.lite.lite import Lite as Lite, PathLike as PathLike
    from stratagem.lite.module import LiteModule as LiteModule
    from stratagem.lite.objects import numbers_of as numbers_of
    from stratagem.lite.state import collect as collect, restore as restore

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(__name__, None)
