"""Loaders, batches and what is in them, by Lightning's helpers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from stratagem.data import map_tensors, move_to_device
from stratagem.errors import ConfigurationError
from stratagem.launch import available_cores, rank_zero_warn
from stratagem.module import HyperParameters
from stratagem_lightning.api.utilities.warnings import WarningCache


def first_of_one(gathered: Any, world_size: int) -> Any:
    """Return the tensors of one rank without the dimension of ranks, as Lightning does.

    Args:
        gathered: tensors of shape (world_size, *shape).
        world_size: the number of ranks.
    """
    if world_size > 1:
        return gathered
    return map_tensors(lambda tensor: tensor.squeeze(0), gathered)


warning_cache = WarningCache()
"""What was said once of batches."""


class AttributeDict(HyperParameters):
    """A dict whose values are attributes too."""

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(key)) for key in self), default=0) + 3
        return "\n".join(f"{f'{key!r}:':<{width}} {self[key]}" for key in sorted(map(str, self)))


def extract_batch_size(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor; 1 for a scalar tensor.

    A warning is raised if other tensors of the batch have another first dimension.

    Raises:
        ConfigurationError: the batch has no tensor.
    """
    sizes = [
        1 if leaf.dim() == 0 else len(leaf)
        for leaf in _leaves(batch)
        if isinstance(leaf, torch.Tensor)
    ]
    if any(size != sizes[0] for size in sizes):
        warning_cache.warn(
            "Trying to infer the `batch_size` from an ambiguous collection: its tensors have "
            f"different first dimensions. The batch size we found is {sizes[0]}. Pass it, as in "
            "self.log(..., batch_size=batch_size)"
        )
    if sizes:
        return sizes[0]
    raise ConfigurationError(
        "We could not infer the batch_size from the batch, which has no tensor: pass it, as in "
        "self.log(..., batch_size=batch_size)"
    )


def weight_of(batch: Any) -> int:
    """Return the weight of a value that is logged with a batch; 1 for one without a tensor."""
    try:
        return 1 if batch is None else extract_batch_size(batch)
    except ConfigurationError:
        return 1


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name) for field in fields(batch)]
    elif isinstance(batch, (torch.Tensor, str)) or not isinstance(batch, Iterable):
        yield batch
        return
    for part in batch:
        yield from _leaves(part)


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether a loader reads an IterableDataset."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """Return a loader's length, or None if it has none."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Whether a loader has a length; warns if it is 0, or may be wrong."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length. Is that what you want?")
    if length is not None and has_iterable_dataset(dataloader):
        rank_zero_warn(
            "the loader has a length although its dataset is an IterableDataset: with several "
            "workers each must yield its own part"
        )
    return length is not None


def has_len_all_ranks(dataloader: object, strategy: Any, allow_zero_length: bool = False) -> bool:
    """Whether a loader has a length on every rank.

    Raises:
        ConfigurationError: the length is 0 on some ranks only.
    """
    length = sized_len(dataloader)
    if length is None:
        return False
    longest = int(strategy.ranks.all_reduce(torch.tensor(float(length)), "max"))
    if not longest:
        rank_zero_warn("Total length of `DataLoader` across ranks is zero. Is that what you want?")
        return True
    if not length and not allow_zero_length:
        raise ConfigurationError(
            f"the loader is empty on rank {strategy.ranks.global_rank}, and another rank's is not"
        )
    return has_len(dataloader)


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers a loader may have on this machine.

    Args:
        local_world_size: processes of this machine that read.
    """
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, received {local_world_size}")
    return max(1, available_cores() // local_world_size - 1)


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a nested collection with its tensors on a device."""
    return move_to_device(batch, torch.device(device))


def convert_to_tensors(data: Any, device: torch.device) -> Any:
    """Return a nested collection with its numbers as tensors on a device."""

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(convert(one) for one in value)
        numbers = isinstance(value, (bool, int, float))
        return torch.tensor(value, device=device) if numbers else value

    return move_to_device(convert(data), device)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Return a nested collection with its tensors of one element as numbers.

    Raises:
        ValueError: a tensor has several.
    """

    def number(tensor: torch.Tensor) -> Any:
        if tensor.numel() != 1:
            raise ValueError(
                f"The tensor does not contain a single element, but {tensor.numel()}: pass one "
                "that can be a number"
            )
        return tensor.item()

    return map_tensors(number, data)
