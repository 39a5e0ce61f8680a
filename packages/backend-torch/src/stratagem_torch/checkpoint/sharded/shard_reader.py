"""ShardReader: tensors of a directory, of which each rank reads what it needs.

The directory is one that `ShardWriter` or `dcp.save` has written. DCP finds which saved chunks a
wanted one is made of; its reader is not used, since it executes what the layout file asks for.
Here the layout is read by an unpickler that makes nothing but descriptions of tensors, in
`layout_reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stratagem.checkpoint import LazyTensor, MappedFile, Refused, Shards
from stratagem.errors import CheckpointCorruptError
from stratagem.storage import is_name
from stratagem_torch.checkpoint.sharded.layout_reader import check_places, read_layout
from stratagem_torch.checkpoint.sharded.manifest import open_member, size_of_member


class ShardReader:
    """Reads tensors of a directory that `ShardWriter` or `dcp.save` has written.

    Args:
        folder: the directory.
        layout: contents of its `.metadata`.

    Attributes:
        paths: the path of each entry in the checkpoint.
        objects: the names of the entries that are not tensors.
        files: the names of the files that contain the tensors.

    Raises:
        CheckpointCorruptError: the layout cannot be read, contradicts itself or the files, or
            requests the execution of code.
    """

    def __init__(self, folder: Path, layout: bytes) -> None:
        self.folder = folder
        self._metadata = read_layout(folder, layout)
        entries = self._metadata.state_dict_metadata
        self._entries = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = [name for name in entries if name not in self._entries]
        given = self._metadata.planner_data
        self.paths: dict[str, tuple[Any, ...]] = {
            name: given[name] if isinstance(given, dict) and name in given else (name,)
            for name in entries
        }
        self._files: dict[str, MappedFile] = {}
        self.files = {info.relative_path for info in self._metadata.storage_data.values()}
        self._check_places()

    @property
    def tensors(self) -> dict[str, _Saved]:
        """By name, to be read.

        They hold the reader, with the files that it has mapped, and it does not hold them: what was
        removed gives its place on the disk back as soon as nobody reads it.
        """
        return {name: _Saved(self, name, entry) for name, entry in self._entries.items()}

    def read(self, name: str, target: Tensor | Shards) -> None:
        """Fill a tensor, or chunks of a tensor, from the checkpoint."""
        if isinstance(target, Tensor):
            target = Shards(
                tuple(self._entries[name].size), target.dtype, [((0,) * target.ndim, target)]
            )
        chunks = {offsets: chunk for offsets, chunk in target.chunks if chunk.numel()}
        wanted = [ChunkStorageMetadata(torch.Size(o), chunk.shape) for o, chunk in chunks.items()]
        entry = self._entries[name]
        for item in create_read_items_for_chunk_list(name, entry, wanted):
            place = self._metadata.storage_data[item.storage_index]
            saved = self._load(name, place, entry.chunks[item.storage_index.index or 0].sizes)
            chunk = chunks[tuple(item.dest_index.offset or ())]
            chunk[_slices(item.dest_offsets, item.lengths)] = saved[
                _slices(item.storage_offsets, item.lengths)
            ]

    def check_parts(self) -> None:
        """Read every saved part, but for its elements.

        Raises:
            CheckpointCorruptError: one cannot be read.
        """
        for name, entry in self._entries.items():
            for chunk in entry.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._load(name, self._metadata.storage_data[index], chunk.sizes)

    def _load(self, name: str, place: _StorageInfo, shape: torch.Size) -> Tensor:
        """Return a chunk that was saved, mapped into memory."""
        path = f"{self.folder} (its tensor {name!r})"
        tensor = self._map(place.relative_path).load(path, start=place.offset, size=place.length)
        if not isinstance(tensor, Tensor):
            raise self._damage(name, f"there is a {type(tensor).__name__}")
        if tensor.shape != shape:
            raise self._damage(name, f"a chunk has the shape {tensor.shape}, not {shape}")
        dtype = self._entries[name].properties.dtype
        if (tensor.dtype, tensor.layout, tensor.device.type) != (dtype, torch.strided, "cpu"):
            raise self._damage(
                name, f"a chunk is of {tensor.dtype}, {tensor.layout}, {tensor.device}, not {dtype}"
            )
        return tensor.detach()

    def _map(self, name: str) -> MappedFile:
        if name not in self._files:
            with open_member(self.folder, name) as file:
                self._files[name] = MappedFile(file, str(self.folder / name))
        return self._files[name]

    def _damage(self, name: str, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{str(self.folder)!r} is damaged: its tensor {name!r} cannot be read ({why})"
        )

    def _check_places(self) -> None:
        """Refuse a layout whose chunks are not in the directory, or hold less than they claim."""
        sizes: dict[str, int] = {}
        try:
            for index, info in self._metadata.storage_data.items():
                file = info.relative_path
                if not is_name(file):
                    raise Refused(f"{index.fqn!r} lies in {file!r}, out of the directory")
                if file not in sizes:
                    sizes[file] = size_of_member(self.folder, file)
            check_places(self._metadata, sizes)
        except Refused as error:
            raise CheckpointCorruptError(
                f"{str(self.folder)!r} was refused: its layout says that {error}. It is damaged, "
                "or was made to do harm"
            ) from error


class _Saved(LazyTensor):
    """A tensor in a directory."""

    def __init__(self, reader: ShardReader, name: str, entry: TensorStorageMetadata) -> None:
        self.shape = tuple(entry.size)
        self.dtype = entry.properties.dtype
        self.chunks = entry.chunks
        self._reader = reader
        self._name = name

    def __repr__(self) -> str:
        return f"LazyTensor({self._name!r}, shape={self.shape}, dtype={self.dtype})"

    def read_into(self, target: Tensor | Shards) -> None:
        if tuple(target.shape) != self.shape:
            raise ValueError(f"{self!r} cannot be read into a tensor of shape {target.shape}")
        self._reader.read(self._name, target)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
