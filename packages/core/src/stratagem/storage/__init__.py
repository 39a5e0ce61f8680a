"""Bytes at a path or a URL: durable, locked, claimed. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.storage.local import (
        DurableDirectory as DurableDirectory,
        StreamedFile as StreamedFile,
        open_regular as open_regular,
        sync_directory as sync_directory,
    )
    from stratagem.storage.paths import (
        Location as Location,
        absolute as absolute,
        check_is_new as check_is_new,
        durable_replace as durable_replace,
        exists as exists,
        is_name as is_name,
        is_url as is_url,
        join as join,
        parse_user_path as parse_user_path,
        read as read,
        to_location as to_location,
        try_folder as try_folder,
        write as write,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
