"""ShardReader: tensors of a directory, of which each rank reads what it needs.

The directory is one that `ShardWriter` or `dcp.save` has written. DCP finds which saved chunks a
wanted one is made of; its reader is not used, since it executes what the layout file asks for.
Here the layout is read by an unpickler that makes nothing but descriptions of tensors.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stratagem.errors import CheckpointCorruptError
from stratagem.state.shards import LazyTensor, Shards
from stratagem.storage.paths import is_name


class ShardReader:
    """Reads tensors of a directory that `ShardWriter` or `dcp.save` has written.

    Args:
        folder: the directory.
        layout: contents of its `.metadata`.

    Attributes:
        tensors: by name, to be read.
        paths: where each stands in the checkpoint.
        objects: names of what was saved as other objects than tensors.

    Raises:
        CheckpointCorruptError: the layout cannot be read, contradicts itself or the files, or asks
            for something to be executed.
    """

    def __init__(self, folder: Path, layout: bytes) -> None:
        self.folder = folder
        self._metadata = _read_layout(folder, layout)
        entries = self._metadata.state_dict_metadata
        self._entries = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.tensors = {name: _Saved(self, name, entry) for name, entry in self._entries.items()}
        self.objects = [name for name in entries if name not in self.tensors]
        given = self._metadata.planner_data
        self.paths: dict[str, tuple[Any, ...]] = {
            name: given[name] if isinstance(given, dict) and name in given else (name,)
            for name in entries
        }
        self._check_places()

    def read(self, name: str, target: Tensor | Shards) -> None:
        """Fill a tensor, or chunks of it."""
        if isinstance(target, Tensor):
            target = Shards(self.tensors[name].shape, target.dtype, [((0,) * target.ndim, target)])
        chunks = {offsets: chunk for offsets, chunk in target.chunks if chunk.numel()}
        wanted = [ChunkStorageMetadata(torch.Size(o), chunk.shape) for o, chunk in chunks.items()]
        entry = self._entries[name]
        for item in create_read_items_for_chunk_list(name, entry, wanted):
            saved = self._load(name, self._metadata.storage_data[item.storage_index])
            expected = entry.chunks[item.storage_index.index or 0].sizes
            if saved.shape != expected:
                raise self._damage(name, f"a chunk has the shape {saved.shape}, not {expected}")
            chunk = chunks[tuple(item.dest_index.offset or ())]
            chunk[_slices(item.dest_offsets, item.lengths)] = saved[
                _slices(item.storage_offsets, item.lengths)
            ]

    def _load(self, name: str, place: _StorageInfo) -> Tensor:
        """Return a chunk that was saved."""
        try:
            with (self.folder / place.relative_path).open("rb", buffering=0) as file:
                piece = io.BufferedReader(_Piece(file.fileno(), place.offset, place.length))
                _check_stored(piece, place.length)
                tensor = torch.load(piece, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{str(self.folder)!r} was refused: in the place of the tensor {name!r} is "
                "something that loading would have to execute"
            ) from error
        # What torch raises for damaged contents is not documented.
        except (RuntimeError, OSError, ValueError, LookupError, AssertionError, EOFError) as error:
            raise self._damage(name, f"{type(error).__name__}: {error}") from error
        if not isinstance(tensor, Tensor):
            raise self._damage(name, f"there is a {type(tensor).__name__}")
        return tensor

    def _damage(self, name: str, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{str(self.folder)!r} is damaged: its tensor {name!r} cannot be read ({why})"
        )

    def _check_places(self) -> None:
        """Refuse a layout whose chunks are not in the directory, or hold less than they claim."""
        sizes: dict[str, int] = {}
        places: Mapping[Any, Any] = self._metadata.storage_data
        for index, info in places.items():
            file = info.relative_path
            if not is_name(file):
                raise self._refusal(f"{index.fqn!r} lies in {file!r}, out of the directory")
            if file not in sizes:
                path = self.folder / file
                sizes[file] = path.stat().st_size if path.is_file() else -1
            if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[file]:
                raise self._refusal(
                    f"{index.fqn!r} lies in {file!r} from {info.offset} to "
                    f"{info.offset + info.length}, which "
                    + ("is missing" if sizes[file] < 0 else f"has {sizes[file]} bytes")
                )
            if info.transform_descriptors:
                raise self._refusal(
                    f"{index.fqn!r} was transformed by {info.transform_descriptors}; expected "
                    "plain tensors"
                )
        for name, saved in self.tensors.items():
            stored = covered = 0
            for chunk in saved.chunks:
                info = places.get(MetadataIndex(name, chunk.offsets))
                if info is None:
                    raise self._refusal(f"{name!r} has no chunk at {tuple(chunk.offsets)}")
                stored += info.length
                covered += math.prod(chunk.sizes)
            if covered < math.prod(saved.shape) or stored < covered * saved.dtype.itemsize:
                raise self._refusal(
                    f"{name!r} is a tensor of {math.prod(saved.shape)} elements, of which only "
                    f"{stored} bytes are stored"
                )

    def _refusal(self, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{str(self.folder)!r} was refused: its layout says that {what}. It is damaged, or was "
            "made to do harm"
        )


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


class _Piece(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as view:
            length = max(0, min(view.nbytes, self._length - self._at))
            with view[:length] as wanted:
                read = os.preadv(self._descriptor, [wanted], self._start + self._at)
        self._at += read
        return read


def _check_stored(piece: IO[bytes], length: int) -> None:
    """Refuse a chunk that would grow when it is read.

    Raises:
        ValueError: says which entry.
    """
    try:
        entries = zipfile.ZipFile(piece).infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"no zip archive: {error}") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > length:
            raise ValueError(f"its entry {entry.filename!r} is compressed")
    piece.seek(0)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))


_LAYOUT_MODULE = "torch.distributed.checkpoint.metadata"
# What DCP's layouts are made of; to make any of it runs nothing else.
_DESCRIPTIONS = {
    (_LAYOUT_MODULE, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _LayoutUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _DESCRIPTIONS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_layout(folder: Path, layout: bytes) -> Metadata:
    try:
        metadata = _LayoutUnpickler(io.BytesIO(layout)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise TypeError(f"it is a {type(metadata).__name__}")
        for index, info in metadata.storage_data.items():
            if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
                raise TypeError(f"it has a {type(index).__name__} and a {type(info).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(
                entry, (TensorStorageMetadata, BytesStorageMetadata)
            ):
                raise TypeError(f"it has a {type(entry).__name__}")
    except pickle.UnpicklingError as error:
        raise CheckpointCorruptError(
            f"{str(folder / '.metadata')!r} was refused: it asks for {error}, and a layout of "
            "tensors has no need of that. Only load checkpoints of plain data"
        ) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{str(folder / '.metadata')!r} is damaged: {type(error).__name__}: {error}"
        ) from error
    return metadata
