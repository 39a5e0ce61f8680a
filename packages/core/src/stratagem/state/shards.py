"""Shards, a tensor spread over ranks; LazyTensor, a tensor that still lies in a checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Shards:
    """The chunks of a tensor on this rank, which ranks save in parallel.

    A chunk is a rectangular region of the unsharded tensor. Together the chunks of all ranks cover
    it; a chunk that several ranks hold is written by a single rank.

    Attributes:
        shape: the shape of the unsharded tensor.
        dtype: the dtype of the tensor.
        chunks: for each chunk, its offsets in the unsharded tensor (a number for each dim) and its
            values, on any device. The values may alias live tensors. The list may be empty.

    Example:
        >>> import torch
        >>> from stratagem.checkpoint import Shards
        >>> whole = torch.arange(6).reshape(3, 2)
        >>> second_half = Shards.of_flat((3, 2), whole.flatten()[3:], start=3)
        >>> [(offsets, chunk.tolist()) for offsets, chunk in second_half.chunks]
        [((1, 1), [[3]]), ((2, 0), [[4, 5]])]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def of_flat(shape: Sequence[int], flat: Tensor, *, start: int) -> Shards:
        """Return the chunks of a range of a flattened tensor; they alias it.

        Args:
            shape: the shape of the unsharded tensor.
            flat: shape (n,): the elements from `start` on, in row-major order.
            start: where the range begins, in elements.
        """
        shape = tuple(shape)
        chunks = []
        for offsets, sizes, begin in _chunks_of_range(shape, start, start + flat.numel()):
            values = flat[begin - start : begin - start + math.prod(sizes)]
            chunks.append((offsets, values.view(sizes)))
        return Shards(shape, flat.dtype, chunks)

    def map(self, function: Callable[[Tensor], Tensor]) -> Shards:
        """Return the same chunks with `function` of each."""
        return Shards(self.shape, self.dtype, [(o, function(chunk)) for o, chunk in self.chunks])

    # The methods that torch.distributed.checkpoint calls on an object that it saves and fills.

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
                    chunk=ChunkStorageMetadata(torch.Size(offsets), chunk.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.shape),
                ),
            )
            for offsets, chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), chunk.shape) for offsets, chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, chunk in self.chunks:
            if offsets == tuple(index.offset):
                return chunk
        raise KeyError(f"{index}: this rank holds {[offsets for offsets, _ in self.chunks]}")


class LazyTensor(ABC):
    """A tensor in a checkpoint that is not read yet; each rank reads only the parts it needs.

    Attributes:
        shape: the shape of the unsharded tensor.
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
        """Fill `target`, a tensor of this shape, or chunks of one, from the checkpoint.

        Nothing is communicated. Values are converted to the target's dtype.

        Raises:
            CheckpointCorruptError: the checkpoint lacks a part of the tensor.
        """

    def whole(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor


Data = TypeVar("Data")


def read_whole(data: Data) -> Data:
    """Return safe data with every `LazyTensor` read whole; shared tensors stay shared.

    Example:
        >>> from stratagem.checkpoint import read_whole
        >>> read_whole({"step": 3, "sizes": [1, 2]})
        {'step': 3, 'sizes': [1, 2]}
    """
    return cast("Data", _read_whole(data, {}))


def _read_whole(data: Any, done: dict[int, Any]) -> Any:
    if isinstance(data, LazyTensor):
        return data.whole()
    if not isinstance(data, dict) and type(data) not in (list, tuple):
        return data
    if id(data) not in done:
        if isinstance(data, dict):
            whole: Any = {name: _read_whole(value, done) for name, value in data.items()}
        else:
            whole = type(data)(_read_whole(value, done) for value in data)
        done[id(data)] = whole
    return done[id(data)]


def has_shards(data: Any) -> bool:
    """Return whether a dict or list contains `Shards`, at any depth.

    Example:
        >>> from stratagem.checkpoint import has_shards
        >>> has_shards({"layers": [1, 2]})
        False
    """
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


def _chunks_of_range(
    shape: tuple[int, ...], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the range [start, end) of a flattened tensor into chunks of the tensor.

    Returns:
        Of each its offsets, its sizes, and where it begins in the flattened tensor.
    """
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,) if shape else (), (end - start,) if shape else (), start)]
    row = math.prod(shape[1:])
    chunks = []
    first, last = -(-start // row), end // row  # the whole rows between
    if first > last:  # within one row
        pieces = [(start, end)]
    else:
        pieces = [(start, first * row), (last * row, end)]
        if first < last:
            zeros = (0,) * (len(shape) - 1)
            chunks.append(((first, *zeros), (last - first, *shape[1:]), first * row))
    for begin, stop in pieces:
        if begin < stop:
            index = begin // row
            within = _chunks_of_range(shape[1:], begin - index * row, stop - index * row)
            for offsets, sizes, at in within:
                chunks.append(((index, *offsets), (1, *sizes), at + index * row))
    return sorted(chunks, key=lambda chunk: chunk[2])
