"""A folder of weights, written from a checkpoint without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import LazyTensor
from stratagem.errors import CheckpointContentError, format_names
from stratagem_extras.pretrained.folder import open_folder
from stratagem_extras.pretrained.save import names_to_write
from stratagem_extras.pretrained.writer import NewFolder


def convert_to_folder(
    tensors: Mapping[str, Tensor | LazyTensor],
    folder: Path,
    *,
    like: Path | None,
    dtype: str | None,
    max_shard_size: str,
) -> str:
    """Write the weights of a checkpoint as a folder, one by one; return a description.

    Args:
        tensors: the weights by name, which may lie in the checkpoint.
        folder, like, dtype, max_shard_size: as in `save_pretrained`.

    Raises:
        ConfigurationError, CheckpointError: as in `save_pretrained`.
    """
    if adapters := [name for name in tensors if ".lora_" in name]:
        raise CheckpointContentError(
            f"cannot write {str(folder)!r}: the checkpoint has adapters ({format_names(adapters)}),"
            " which the layout has no place for: merge them first (merge_and_unload)"
        )
    ties = _ties_in(tensors)
    names = names_to_write(tensors, ties, like, None, "")
    if like is not None:
        names = _without_copies(tensors, names, set(open_folder(like)))
    described = {new: (tuple(tensors[n].shape), tensors[n].dtype) for n, new in names.items()}
    written = NewFolder(folder, described, dtype, max_shard_size)
    written.add_files(like)
    for name, new in names.items():
        value = tensors[name]
        written.write(new, value.whole() if isinstance(value, LazyTensor) else value)
    written.commit()
    files = f"{written.files} file" + "s" * (written.files > 1)
    return f"{folder}: {len(names)} tensors, {written.total} bytes in {files}"


def _ties_in(tensors: Mapping[str, Tensor | LazyTensor]) -> dict[str, str]:
    """Return the first name of each tensor; tensors that share their memory are tied."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault(
            (value.data_ptr(), value.shape, value.stride())
            if isinstance(value, Tensor) and value.numel()
            else name,
            name,
        )
        for name, value in tensors.items()
    }


def _without_copies(
    tensors: Mapping[str, Tensor | LazyTensor], names: Mapping[str, str], known: set[str]
) -> dict[str, str]:
    """Leave out tensors that the folder lacks and that equal one that it has: they are tied."""

    def whole(name: str) -> Tensor:
        value = tensors[name]
        return value.whole() if isinstance(value, LazyTensor) else value

    kept = {name: new for name, new in names.items() if new in known}
    for name in names.keys() - kept.keys():
        alike = [n for n in kept if tuple(tensors[n].shape) == tuple(tensors[name].shape)]
        if not any(torch.equal(whole(name), whole(other)) for other in alike):
            kept[name] = names[name]
    return {name: new for name, new in names.items() if name in kept}
