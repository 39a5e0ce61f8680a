"""The layout of a directory of `torch.distributed.checkpoint`, read and compared with the files."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stratagem.checkpoint import Refused
from stratagem.errors import CheckpointCorruptError, format_text, format_value
from stratagem.state import SafeUnpickler, check_dims

# Most keys that lead to a tensor of a checkpoint.
_DEEPEST = 256


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _empty(*args: Any) -> OrderedDict[Any, Any]:
    if args:
        raise Refused("an OrderedDict is made of something")
    return OrderedDict()


def _size(*args: Any) -> torch.Size:
    [numbers] = args or [()]
    if type(numbers) not in (list, tuple):
        raise Refused(f"a size is made of a {type(numbers).__name__}")
    return torch.Size(numbers)


# Classes in the layouts of DCP; building them runs no other code.
_CLASSES: Mapping[str, Any] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, _StorageInfo),
        *(TensorProperties, TensorStorageMetadata, dcp.StorageMeta),
    )
}
_MAKERS: Mapping[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": dcp._MEM_FORMAT_ENCODING,
    "collections.OrderedDict": _empty,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
}
_VALUES: Mapping[str, Any] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


def read_layout(folder: Path, data: bytes) -> Metadata:
    """Return the layout of a directory from the contents of its `.metadata` file.

    Raises:
        CheckpointCorruptError: the data is not a layout, or requests the execution of code.
    """
    try:
        metadata = SafeUnpickler(data, _MAKERS, _CLASSES, _VALUES).load()
        _check_kinds(metadata)
    except pickle.UnpicklingError as error:
        raise CheckpointCorruptError(
            f"{str(folder / '.metadata')!r} was refused: it asks for {format_text(str(error))}, "
            "and a layout of tensors has no need of that. Only load checkpoints of "
            "weights-only-safe data"
        ) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{str(folder / '.metadata')!r} is damaged: {type(error).__name__}: "
            f"{format_text(str(error))}"
        ) from error
    assert isinstance(metadata, Metadata)
    return metadata


def _check_kinds(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise TypeError(f"it is a {type(metadata).__name__}")
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise TypeError(f"it has a {type(index).__name__} and a {type(info).__name__}")
        if type(index.fqn) is not str or type(info.offset) is not int:
            place, offset = format_value(index.fqn), format_value(info.offset)
            raise TypeError(f"it has a place of {place} at {offset}")
        if type(info.length) is not int or type(info.relative_path) is not str:
            file, length = format_value(info.relative_path), format_value(info.length)
            raise TypeError(f"it has a place in {file} of {length} bytes")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or not isinstance(
            entry, (TensorStorageMetadata, BytesStorageMetadata)
        ):
            raise TypeError(f"it has a {type(entry).__name__}")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
    paths = metadata.planner_data
    for place in paths.values() if isinstance(paths, dict) else ():
        if type(place) is not tuple or not 0 < len(place) <= _DEEPEST:
            raise TypeError(f"it has a tensor at {format_value(place)}")
        if not all(type(part) in (str, int) for part in place):
            raise TypeError("it has a tensor under a key that is neither a text nor a number")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    if not isinstance(entry.properties.dtype, torch.dtype) or type(entry.chunks) is not list:
        raise TypeError(
            f"{format_value(name)} is a tensor of {format_value(entry.properties.dtype)}"
        )
    check_dims(entry.size)
    for chunk in entry.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise TypeError(f"{format_value(name)} has a chunk that is a {type(chunk).__name__}")
    for numbers in (entry.size, *(n for c in entry.chunks for n in (c.offsets, c.sizes))):
        if not isinstance(numbers, torch.Size) or len(numbers) != len(entry.size):
            size = repr(numbers) if isinstance(numbers, torch.Size) else format_value(numbers)
            raise TypeError(f"{format_value(name)} has the size {size}")
        if min(numbers, default=0) < 0:
            raise ValueError(f"{format_value(name)} has the size {tuple(numbers)}")


def check_places(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise if parts of a layout are outside of the files, overlap, or are incomplete tensors.

    Args:
        metadata: the layout.
        sizes: the size in bytes of each file that the layout names; -1 if the file is missing.

    Raises:
        Refused: the layout is inconsistent; the message names the tensor or file.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in metadata.storage_data.items():
        end, size = info.offset + info.length, sizes[info.relative_path]
        if info.offset < 0 or info.length < 0 or end > size:
            raise Refused(
                f"{index.fqn!r} lies in {info.relative_path!r} from {info.offset} to {end}, which "
                + ("is missing" if size < 0 else f"has {size} bytes")
            )
        if getattr(info, "transform_descriptors", None):
            raise Refused(f"{index.fqn!r} was transformed; expected plain tensors")
        ranges.setdefault(info.relative_path, []).append((info.offset, end, index.fqn))
    for file, parts in ranges.items():
        for (_, end, name), (start, _, other) in pairwise(sorted(parts)):
            if start < end:
                raise Refused(f"{name!r} and {other!r} share bytes of {file!r}")
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            _check_chunks(metadata, name, saved)


def _check_chunks(metadata: Metadata, name: str, saved: TensorStorageMetadata) -> None:
    whole, covered = math.prod(saved.size), 0
    for chunk in saved.chunks:
        info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise Refused(f"{name!r} has no chunk at {tuple(chunk.offsets)}")
        count = math.prod(chunk.sizes)
        covered += count
        if info.length < count * saved.properties.dtype.itemsize:
            raise Refused(
                f"{name!r} has a chunk of {count} elements, of which only {info.length} bytes are "
                "stored"
            )
        for offset, size, limit in zip(chunk.offsets, chunk.sizes, saved.size, strict=True):
            if offset + size > limit:
                raise Refused(
                    f"{name!r} has a chunk of the size {tuple(chunk.sizes)} at "
                    f"{tuple(chunk.offsets)}, which leads out of {tuple(saved.size)}"
                )
    if covered != whole:
        raise Refused(f"{name!r} is a tensor of {whole} elements, of which {covered} are stored")
    if _overlap([chunk for chunk in saved.chunks if math.prod(chunk.sizes)]):
        raise Refused(f"{name!r} has chunks that share elements")


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two of some boxes share a point."""
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].offsets))
    if not dims:
        return True
    # Along the dim with the most different offsets, only open chunks have to be compared.
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    opened: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        opened = [other for other in opened if other.offsets[along] + other.sizes[along] > start]
        for other in opened:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                for dim in dims
            ):
                return True
        opened.append(chunk)
    return False
