"""A folder of weights, written from a checkpoint without a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import LazyTensor
from stratagem.errors import format_names
from stratagem_extras.pretrained.adapters import (
    CONFIG,
    WEIGHTS,
    is_adapter,
    names_in_checkpoint,
    open_adapter,
)
from stratagem_extras.pretrained.folder import open_folder
from stratagem_extras.pretrained.names import check_names, match_names
from stratagem_extras.pretrained.save import names_to_write, new_in
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
    added: list[str] = []
    left_out: list[str] = []
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
            left_out = [n for n in tensors if n not in names and not _copy_of(tensors, n, names)]
        described = _described(tensors, names)
        added = [] if like is None else new_in(like, described, has_config=False)
        written = NewFolder(folder, described, dtype, max_shard_size)
        written.add_files(like)
    for name, new in names.items():
        value = tensors[name]
        written.write(new, value.whole() if isinstance(value, LazyTensor) else value)
    written.commit()
    files = f"{written.files} file" + "s" * (written.files > 1)
    more = f"; {like} has no {format_names(added)}, so that its config may not fit" if added else ""
    if left_out:
        more += f"; left out, since {like} has no place for them: {format_names(left_out)}"
    return f"{folder}: {len(names)} tensors, {written.total} bytes in {files}{more}"


def read_folder(folder: Path, like: Mapping[str, Tensor | LazyTensor] | None) -> dict[str, Tensor]:
    """Return the weights of a folder, whole, by the names of a model.

    Args:
        folder: a folder of safetensors, or one file.
        like: the tensors of a checkpoint of the model; None: the names stay.

    Raises:
        CheckpointMismatchError: names or shapes differ.
        CheckpointError: as of `open_folder`.
    """
    stored = open_folder(folder)
    sources = {name: name for name in stored}
    if like is not None:
        found = match_names(list(like), list(stored))
        ties = {name: _copy_of(like, name, found.sources) or name for name in found.missing}
        shapes = {name: tuple(value.shape) for name, value in like.items()}
        check_names(found, shapes, {n: value.shape for n, value in stored.items()}, ties)
        sources = {name: found.sources[ties.get(name, name)] for name in like}
    whole = {source: stored[source].whole() for source in set(sources.values())}
    return {name: whole[source] for name, source in sources.items()}


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
    kept = {name: new for name, new in names.items() if new in known}
    for name in names.keys() - kept.keys():
        if _copy_of(tensors, name, kept) is None:
            kept[name] = names[name]
    return {name: new for name, new in names.items() if name in kept}


def _copy_of(
    tensors: Mapping[str, Tensor | LazyTensor], name: str, others: Iterable[str]
) -> str | None:
    """Return which of other tensors a tensor equals."""

    def whole(one: str) -> Tensor:
        value = tensors[one]
        return value.whole() if isinstance(value, LazyTensor) else value

    shape = tuple(tensors[name].shape)
    alike = [one for one in others if tuple(tensors[one].shape) == shape]
    return next((one for one in alike if torch.equal(whole(name), whole(one))), None)
