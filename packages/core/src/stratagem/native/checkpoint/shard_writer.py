"""ShardWriter: this rank's share of tensors, in the format of torch.distributed.checkpoint (DCP).

DCP's planner decides who writes what, and its writer how it lies in a file. Two things differ from
`dcp.save`: ranks exchange their plans as plain data (DCP pickles them), and every byte goes through
a file of the caller's, which hashes it and brings it to the disk.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from stratagem.state.shards import Shards

HeldTensors = Mapping[str, Tensor | Shards]
"""By name, whole tensors (alike on every rank) or the chunks that this rank holds."""


class ShardWriter:
    """Writes this rank's share of tensors.

    Call `describe` on every rank, exchange what it returns, call `agree` with all of it, then
    `write`; on one rank `layout`, with what all `write` calls have returned.

    Args:
        tensors: what this rank holds of each.
    """

    def __init__(self, tensors: HeldTensors) -> None:
        self._planner = _SavePlanner()
        self._planner.set_up_planner(dict(tensors), is_coordinator=True)

    def describe(self) -> list[Any]:
        """Return which chunks this rank holds, as plain data."""
        plan = self._planner.create_local_plan()
        return [_describe(item) for item in plan.items]

    def agree(self, descriptions: Sequence[list[Any]], rank: int) -> None:
        """Decide from all ranks' chunks who writes what; every rank comes to the same end.

        Raises:
            ValueError: the chunks overlap, or do not cover a tensor.
        """
        plans = [SavePlan([_item(one) for one in of_rank]) for of_rank in descriptions]
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(plans[rank])
        self._rank = rank

    def write(self, folder: Path, create: Callable[[Path], Any]) -> list[Any]:
        """Write this rank's file, if it has anything to write.

        Args:
            folder: where to.
            create: opens a file, which has `write`, `tell` and `close`.

        Returns:
            Where each chunk lies, as plain data.
        """
        if not self._plan.items:
            return []
        writer = FileSystemWriter(folder, sync_files=False)
        writer.fs = _Files(create)
        plan = writer.prepare_global_plan([self._plan])[0]
        plan.storage_data.prefix = f"__{self._rank}_"
        results = writer.write_data(plan, self._planner).wait()
        return [(r.index.fqn, list(r.index.offset or ()), *_place(r.storage_data)) for r in results]

    def layout(self, places: Sequence[list[Any]], paths: Mapping[str, Any]) -> bytes:
        """Return the contents of DCP's `.metadata`.

        Args:
            places: what `write` has returned on each rank.
            paths: where each tensor stands in the checkpoint: keys and indices.
        """
        metadata = self._metadata
        metadata.planner_data = dict(paths)
        metadata.storage_data = {
            MetadataIndex(name, offset): _StorageInfo(file, start, length)
            for of_rank in places
            for name, offset, file, start, length in of_rank
        }
        metadata.storage_meta = StorageMeta()
        metadata.version = "1.0.0"  # of DCP's format
        return pickle.dumps(metadata)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, for `Shards` as well as tensors; whole tensors are written by rank 0."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _chunk(self.state_dict[index.fqn], index)


def _chunk(held: Tensor | Shards, index: MetadataIndex) -> Tensor:
    return held.__get_tensor_shard__(index) if isinstance(held, Shards) else held


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


def _describe(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    assert data is not None
    assert data.chunk is not None
    assert item.index.offset is not None
    return (
        item.index.fqn,
        item.type is WriteItemType.SHARD,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        list(data.size),
        data.properties.dtype,
    )


def _item(description: tuple[Any, ...]) -> WriteItem:
    name, is_shard, offsets, sizes, whole, dtype = description
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD if is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(whole),
        ),
    )


def _place(info: _StorageInfo) -> tuple[str, int, int]:
    return info.relative_path, info.offset, info.length
