"""Lite: the front end for your own loop."""

from __future__ import annotations

from stratagem.lite.dataloader import LiteDataLoader
from stratagem.lite.lite import Lite, PathLike, numbers_of
from stratagem.lite.module import LiteModule
from stratagem.lite.state import collect, restore

__all__ = ["Lite", "LiteDataLoader", "LiteModule", "PathLike", "collect", "numbers_of", "restore"]
