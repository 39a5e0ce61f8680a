"""A folder of weights, written from a checkpoint without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import LazyTensor
from stratagem_extras.pretrained.adapters import (
    CONFIG,
    WEIGHTS,
    is_adapter,
    names_in_checkpoint,
    open_adapter,
)
from stratagem_extras.pretrained.folder import open_folder
from stratagem_extras.pretrained.save import names_to_write
from stratagem_extras.pretrained.writer import Description, NewFolder

_IS_ADAPTER = re.compile(r"(^|\.)base_model\.model\.|\.lora_[^.]+\.")


def convert_to_folder(
    tensors: Mapping[str, Tensor | LazyTensor],
    folder: Path,
    *,
    like: Path | None,
    dtype: str | None,
    max_shard_size: str,
    adapters: Mapping[str, Any],
) -> str:
    """Write the weights of a checkpoint as a folder, one by one; return a description.

    Of weights with adapters of PEFT, the adapter alone is written.

    Args:
        tensors: the weights by name, which may lie in the checkpoint.
        adapters: the configs of adapters by name, as in the checkpoint of a `LanguageModule`; {}:
            unknown ones, so that `like` has to have a config.
        folder, like, dtype, max_shard_size: as in `save_pretrained`.

    Raises:
        ConfigurationError, CheckpointError: as in `save_pretrained`.
    """
    of_adapter = like is not None and is_adapter(like)
    if adapters or of_adapter or any(map(_IS_ADAPTER.search, tensors)):
        configs = {"": open_adapter(like, weights=False)[0]} if like and of_adapter else adapters
        names, config = names_in_checkpoint(tensors, configs, "the checkpoint")
        if like is not None and not of_adapter:
            config["base_model_name_or_path"] = str(like)
        written = NewFolder(folder, _described(tensors, names), dtype, None, single=WEIGHTS)
        written.add_json(CONFIG, config)
    else:
        names = names_to_write(tensors, _ties_in(tensors), like, None, "")
        if like is not None:
            names = _without_copies(tensors, names, set(open_folder(like)))
        written = NewFolder(folder, _described(tensors, names), dtype, max_shard_size)
        written.add_files(like)
    for name, new in names.items():
        value = tensors[name]
        written.write(new, value.whole() if isinstance(value, LazyTensor) else value)
    written.commit()
    files = f"{written.files} file" + "s" * (written.files > 1)
    return f"{folder}: {len(names)} tensors, {written.total} bytes in {files}"


def _described(
    tensors: Mapping[str, Tensor | LazyTensor], names: Mapping[str, str]
) -> dict[str, Description]:
    return {new: (tuple(tensors[n].shape), tensors[n].dtype) for n, new in names.items()}


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
