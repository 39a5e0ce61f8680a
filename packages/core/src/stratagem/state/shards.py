"""Shards, a tensor that is spread over ranks; LazyTensor, one that still lies in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shards:
    """The parts of a tensor that this rank holds: what a strategy gives to be saved in parallel.

    Each part is a box within the whole tensor. Together the parts of all ranks cover it; where two
    ranks hold the same box, one of them writes it.

    Attributes:
        shape: of the whole tensor.
        dtype: its dtype.
        parts: where each box begins, one number for each dim, and the box; on any device. They may
            alias live tensors. A rank may hold none.

    Example:
        >>> import torch
        >>> from stratagem.checkpoint import Shards
        >>> whole = torch.arange(6).reshape(3, 2)
        >>> second_half = Shards.of_flat((3, 2), whole.flatten()[3:], start=3)
        >>> [(offsets, part.tolist()) for offsets, part in second_half.parts]
        [((1, 1), [[3]]), ((2, 0), [[4, 5]])]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def of_flat(shape: Sequence[int], flat: Tensor, *, start: int) -> Shards:
        """Return the boxes of a range of a flattened tensor; they alias it.

        Args:
            shape: of the whole tensor.
            flat: shape (n,): the elements from `start` on, in row-major order.
            start: where the range begins, in elements.
        """
        shape = tuple(shape)
        parts = []
        for offsets, box, begin in _boxes(shape, start, start + flat.numel()):
            size = 1
            for length in box:
                size *= length
            parts.append((offsets, flat[begin - start : begin - start + size].view(box)))
        return Shards(shape, flat.dtype, parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> Shards:
        """Return the same boxes with `function` of each."""
        return Shards(self.shape, self.dtype, [(o, function(part)) for o, part in self.parts])

    # What torch.distributed.checkpoint asks of an object that it saves and fills.

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), part.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.shape),
                ),
            )
            for offsets, part in self.parts
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.parts
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, part in self.parts:
            if offsets == tuple(index.offset):
                return part
        raise KeyError(f"{index}: this rank holds {[offsets for offsets, _ in self.parts]}")


class LazyTensor(ABC):
    """A tensor in a checkpoint of which each rank reads the part that it needs.

    Attributes:
        shape: of the whole tensor.
        dtype: its dtype.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import DirectoryCheckpointIO, LazyTensor, Shards
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> path = f"{tempfile.mkdtemp()}/step=1"
        >>> lite.save(path, {"w": Shards.of_flat((2, 3), torch.arange(6.0), start=0)})
        >>> saved = DirectoryCheckpointIO().open_checkpoint(path)["w"]
        >>> isinstance(saved, LazyTensor), saved.shape
        (True, (2, 3))
        >>> last = torch.zeros(2)
        >>> saved.read_into(Shards.of_flat((2, 3), last, start=4))
        >>> last
        tensor([4., 5.])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read_into(self, target: Tensor | Shards) -> None:
        """Fill `target`, a tensor of this shape, or parts of one, from the checkpoint.

        Nothing is communicated. Numbers are converted to the target's format.

        Raises:
            CheckpointCorruptError: the checkpoint lacks some of it.
        """

    def whole(self) -> Tensor:
        """Return all of it, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor


Data = TypeVar("Data")


def read_whole(data: Data) -> Data:
    """Return plain data with every `LazyTensor` in it read whole."""
    return cast("Data", _read_whole(data))


def _read_whole(data: Any) -> Any:
    if isinstance(data, LazyTensor):
        return data.whole()
    if isinstance(data, dict):
        return {name: _read_whole(value) for name, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_read_whole(value) for value in data)
    return data


def has_shards(data: Any) -> bool:
    """Return whether there are `Shards` in a dict or list, at any depth."""
    try:
        return _has_shards(data)
    except RecursionError:
        return False  # it contains itself; a save refuses that


def _has_shards(data: Any) -> bool:
    if isinstance(data, Shards):
        return True
    if isinstance(data, dict):
        return any(_has_shards(value) for value in data.values())
    if isinstance(data, (list, tuple)):
        return any(_has_shards(value) for value in data)
    return False


def _boxes(
    shape: tuple[int, ...], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the range [start, end) of a flattened tensor into boxes of the tensor.

    Returns:
        Of each its offsets, its shape, and where it begins in the flattened tensor.
    """
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,) if shape else (), (end - start,) if shape else (), start)]
    row = 1
    for length in shape[1:]:
        row *= length
    boxes = []
    first, last = -(-start // row), end // row  # the whole rows between
    if first > last:  # within one row
        pieces = [(start, end)]
    else:
        pieces = [(start, first * row), (last * row, end)]
        if first < last:
            zeros = (0,) * (len(shape) - 1)
            boxes.append(((first, *zeros), (last - first, *shape[1:]), first * row))
    for begin, stop in pieces:
        if begin < stop:
            index = begin // row
            for offsets, box, at in _boxes(shape[1:], begin - index * row, stop - index * row):
                boxes.append(((index, *offsets), (1, *box), at + index * row))
    return sorted(boxes, key=lambda box: box[2])
