"""Bytes at a path or a URL: durable, locked, claimed. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.storage.durable_directory import DurableDirectory as DurableDirectory
    from stratagem.storage.local import sync_directory as sync_directory
    from stratagem.storage.paths import (
        Location as Location,
        check_is_new as check_is_new,
        exists as exists,
        is_url as is_url,
        join as join,
        parse_user_path as parse_user_path,
        read as read,
        to_location as to_location,
        try_folder as try_folder,
        write as write,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "Location": "stratagem.storage.paths",
            "check_is_new": "stratagem.storage.paths",
            "exists": "stratagem.storage.paths",
            "is_url": "stratagem.storage.paths",
            "join": "stratagem.storage.paths",
            "parse_user_path": "stratagem.storage.paths",
            "read": "stratagem.storage.paths",
            "to_location": "stratagem.storage.paths",
            "try_folder": "stratagem.storage.paths",
            "write": "stratagem.storage.paths",
            "DurableDirectory": "stratagem.storage.durable_directory",
            "sync_directory": "stratagem.storage.local",
        },
    )
