"""Loggers of core and of installed distributions; each is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.discovery.exports import exporter
from stratagem.loggers.logger import Logger as Logger

if TYPE_CHECKING:
    from stratagem.loggers.csv_logger import CSVLogger as CSVLogger
    from stratagem.loggers.logger import as_mapping as as_mapping, as_plain as as_plain
    from stratagem.loggers.version_folder import (
        VersionFolder as VersionFolder,
        local_folder as local_folder,
    )

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(__name__, "logger")
