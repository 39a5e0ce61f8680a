"""File systems, by Lightning's helper."""

from __future__ import annotations

import os
from typing import Any


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return fsspec's file system of a path or a URL.

    Args:
        path: a local path, or a URL such as "s3://bucket/run".
        **kwargs: of the file system.

    Example:
        >>> from stratagem_lightning.api.cloud_io import get_filesystem
        >>> get_filesystem("run/last.ckpt").protocol
        ('file', 'local')
    """
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]
