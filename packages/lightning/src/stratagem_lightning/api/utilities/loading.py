"""Files and tensors to load: file systems, lazy files, tensors on the meta device."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return fsspec's file system of a path or a URL.

    Args:
        path: a local path, or a URL such as "s3://bucket/run".
        **kwargs: of the file system.

    Example:
        >>> from stratagem_lightning.api.utilities.loading import get_filesystem
        >>> get_filesystem("run/last.ckpt").protocol
        ('file', 'local')
    """
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]


def is_local_file_protocol(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is of this machine's file system.

    Example:
        >>> is_local_file_protocol("logs"), is_local_file_protocol("s3://bucket/logs")
        (True, False)
    """
    return "://" not in str(path) or str(path).startswith(("file://", "local://"))


def is_dir(fs: Any, path: str | os.PathLike[str], strict: bool = False) -> bool:
    """Whether a path is a folder, which in an object store need not exist unless `strict`.

    Args:
        fs: a file system of `get_filesystem`.
        path: in it.
        strict: the folder must be there.

    Example:
        >>> is_dir(get_filesystem("."), ".")
        True
    """
    name = os.fspath(path)
    is_store = not {"file", "memory"} & {
        *([fs.protocol] if type(fs.protocol) is str else fs.protocol)
    }
    return not fs.isfile(name) if is_store and not strict else bool(fs.isdir(name))


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the content of a `torch.save` file without executing code from the file.

    Args:
        path_or_url: a path, a URL or a file object.
        map_location: as for `torch.load`.
        weights_only: ignored.
    """
    if hasattr(path_or_url, "read"):
        return torch.load(path_or_url, map_location=map_location, weights_only=True)
    with get_filesystem(path_or_url).open(os.fspath(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=True)


def atomic_save(checkpoint: Any, filepath: str | os.PathLike[str]) -> None:
    """Write a `torch.save` file atomically.

    Args:
        checkpoint: data.
        filepath: a path or a URL.
    """
    fs = get_filesystem(filepath)
    with fs.transaction, fs.open(os.fspath(filepath), "wb") as file:
        torch.save(checkpoint, file)


class NotYetLoadedTensor:
    """A tensor before it is read. Files are memory-mapped here, so no tensor is of this type."""


def lazy_load(filename: str | os.PathLike[str]) -> Any:
    """Return the content of a `torch.save` file; tensors are read at their first use.

    Loading never executes code from the file.

    Args:
        filename: a local file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)


def materialize_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, and the first values of its own layers.

    Raises:
        TypeError: a layer has tensors there and no `reset_parameters`; the model is unchanged.
    """
    layers = [layer for layer in module.modules() if _is_meta(layer)]
    without = {type(layer).__name__ for layer in layers if not hasattr(layer, "reset_parameters")}
    if without:
        raise TypeError(
            f"{', '.join(sorted(without))}: expected a method reset_parameters in each layer on "
            "the meta device, which gives it its first values: define one"
        )
    for layer in layers:
        layer.to_empty(device=device, recurse=False)
        reset: Any = layer.reset_parameters
        reset()


def _is_meta(layer: nn.Module) -> bool:
    own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)
