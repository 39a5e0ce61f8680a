"""Writes this rank's share of tensors, in the format of torch.distributed.checkpoint (DCP).

DCP's writer says how it lies in a file. Two things differ from `dcp.save`: who writes what is
planned without DCP (`save_plan.py`), and every byte goes through a file of the caller's, which
hashes it and brings it to the disk.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from stratagem_torch.checkpoint.sharded.save_plan import HeldTensors, SavePlan, chunks_of


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes, as DCP's writer makes it."""
    return f"__{rank}_0.distcp"


def write_share(
    tensors: HeldTensors, plan: SavePlan, rank: int, folder: Path, create: Callable[[Path], Any]
) -> list[list[int]]:
    """Write the file of a rank, unless the rank has no chunks to write.

    Args:
        tensors: the tensors of the rank.
        plan: the chunks that the rank writes.
        rank: the number of the rank.
        folder: the folder of the file.
        create: opens a file, which has `write`, `tell` and `close`.

    Returns:
        The start of each written chunk in the file, and the length of each chunk.
    """
    if not plan.writes:
        return [[], []]
    every = [
        (name, tuple(held.shape), offsets, chunk)
        for name, held in tensors.items()
        for offsets, chunk in chunks_of(held)
    ]
    items, chunks = [], {}
    for number in plan.writes:
        name, shape, offsets, chunk = every[number]
        index = MetadataIndex(name, offsets)
        items.append(_item(index, shape, chunk))
        chunks[index] = chunk
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = _Files(create)
    dcp_plan = writer.prepare_global_plan([planner.SavePlan(items)])[0]
    dcp_plan.storage_data.prefix = file_of(rank).removesuffix("0.distcp")
    # It asks for a storage in a deprecated way in torch 2.9, with which this can go. The filter
    # stays: a save may run in a thread, and `warnings.catch_warnings` is the whole process's.
    warnings.filterwarnings(
        "ignore",
        message="TypedStorage is deprecated",
        category=UserWarning,
        module=r"torch\.distributed\.checkpoint\.filesystem$",
    )
    results = writer.write_data(dcp_plan, _Chunks(chunks)).wait()
    places = {result.index: result.storage_data for result in results}
    return [
        [places[item.index].offset for item in items],
        [places[item.index].length for item in items],
    ]


class _Chunks(DefaultSavePlanner):
    """Answers DCP's writer."""

    def __init__(self, chunks: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._chunks = chunks

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._chunks[index]


class _Files(FileSystem):
    """Opens the files that DCP writes."""

    def __init__(self, create: Callable[[Path], Any]) -> None:
        self._create = create

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        stream = self._create(Path(path))
        try:
            yield stream
        finally:
            stream.close()


def _item(index: MetadataIndex, shape: tuple[int, ...], chunk: Tensor) -> planner.WriteItem:
    return planner.WriteItem(
        index=index,
        type=planner.WriteItemType.SHARD,
        tensor_data=planner.TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(index.offset or ()), chunk.shape),
            properties=TensorProperties(dtype=chunk.dtype),
            size=torch.Size(shape),
        ),
    )
