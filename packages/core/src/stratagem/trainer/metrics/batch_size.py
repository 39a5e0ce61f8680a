"""The number of samples in a batch, which is the weight of a logged value in a mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from stratagem.data.pytree import map_items
from stratagem.launch.rank_zero import rank_zero_warn

_CHECKED = 16
"""The number of logged values for which the sizes of all tensors are compared."""


class BatchSize:
    """Infers the number of samples of batches, without a copy from a device.

    The number is the length of a list of samples, or the first dimension of the first tensor that
    has one. A warning says once if the tensors of a batch have different first dimensions.

    Example:
        >>> import torch
        >>> size = BatchSize()
        >>> size({"temperature": torch.tensor(0.5), "inputs": torch.ones(4, 2)})
        4
        >>> size([{"image": torch.ones(3, 8, 8), "label": label} for label in (0, 1)])
        2
    """

    def __init__(self) -> None:
        self._unchecked = _CHECKED

    def __call__(self, batch: Any) -> int:
        """Return the number of samples; 1 if the batch has no tensor with a dimension."""
        kind = batch.__class__
        if kind is Tensor:
            return batch.size(0) if batch.dim() else 1
        if not self._unchecked and kind in (list, tuple) and batch:
            first = batch[0]
            if first.__class__ is Tensor and first.dim():
                return first.size(0)
        parts = list(_parts(batch)) if kind is list and _are_alike(batch) else None
        if parts is not None and _is_of_samples(parts):
            return len(batch)
        size = next(_sizes(batch), 1)
        if self._unchecked:
            self._unchecked -= 1
            if parts is not None or any(other != size for other in _sizes(batch)):
                self.warn(size)
        return size

    def warn(self, size: int) -> None:
        """Say that the number of samples is uncertain; no further batch is checked."""
        self._unchecked = 0
        rank_zero_warn(
            f"the number of samples in a batch is unclear, and {size} was taken: its tensors have "
            "different first dimensions, or it may be a list of samples. A logged value counts in "
            "the mean of an epoch by that number: pass it, as in self.log(name, value, "
            "batch_size=len(targets))"
        )


def _are_alike(batch: list[Any]) -> bool:
    """Return whether all parts are containers of one kind, such as dicts with the same keys."""
    kind = type(batch[0]) if batch else None
    if kind is None or issubclass(kind, (Tensor, str, int, float)):
        return False
    if not all(type(part) is kind for part in batch):
        return False
    return not issubclass(kind, Mapping) or all(part.keys() == batch[0].keys() for part in batch)


def _is_of_samples(parts: list[Any]) -> bool:
    """Return whether parts can only be of single samples: collated fields agree in their size."""
    if any(isinstance(part, (int, float)) for part in parts):
        return True
    tensors = [part for part in parts if isinstance(part, Tensor)]
    sizes = {part.size(0) if part.dim() else 0 for part in tensors}
    return len(sizes) > 1 or sizes in ({0}, {1})


def _sizes(batch: Any) -> Iterator[int]:
    return (part.size(0) for part in _parts(batch) if isinstance(part, Tensor) and part.dim())


def _parts(data: Any) -> Iterator[Any]:
    """Yield the items of a batch, and of the containers in it, that are no containers."""
    items: list[Any] = []

    def keep(item: Any) -> Any:
        items.append(item)
        return item

    map_items(keep, data)
    if not items:
        yield data
    for item in items:
        yield from (item,) if isinstance(item, Tensor) else _parts(item)
