"""File systems, by Lightning's helper."""

from __future__ import annotations

import os
from typing import Any

from stratagem.errors import ConfigurationError


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return fsspec's file system of a path or a URL.

    Args:
        path: a local path, or a URL such as "s3://bucket/run".
        **kwargs: of the file system.

    Raises:
        ConfigurationError: fsspec is not installed.

    Example:
        >>> from stratagem.lightning.api.cloud_io import get_filesystem
        >>> get_filesystem("run/last.ckpt").protocol
        ('file', 'local')
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigurationError(
            f"get_filesystem({os.fspath(path)!r}) needs fsspec: pip install fsspec"
        ) from error
    return url_to_fs(os.fspath(path), **kwargs)[0]
