"""The layout of a directory as DCP reads it: its `.metadata`, a pickle that is written as a table.

`torch.distributed.checkpoint` (DCP) has five objects for each chunk: 13 us and a kilobyte, which
for the millions of chunks of thousands of ranks are a minute and several gigabytes. Their pickles
differ in a few numbers, which stand in the same places: rows of a table, made without the objects.
"""

from __future__ import annotations

import pickle
import pickle as op
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stratagem.state import bytes_of
from stratagem_torch.checkpoint.sharded.save_plan import GlobalPlan

# Protocols from 4 on number memoized values implicitly.
_PROTOCOL = 2
# Values of many rows are memoized under numbers from here on; temporary values use the numbers
# below.
_FIRST = 64

Get = Callable[[Any], bytes]
Part = bytes | Tensor
"""Of a row: what is the same in all rows, or a number for each, shape (rows,)."""


def encode_layout(
    plan: GlobalPlan, files: list[str], places: Tensor, paths: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield the contents of DCP's `.metadata`.

    Args:
        plan: the chunks that all ranks write.
        files: the file name of each rank.
        places: the start of each chunk in the file of its writer, and its length; shape (2,
            chunks).
        paths: the path of each tensor in the checkpoint: keys and indices.
    """
    yield op.PROTO + bytes([_PROTOCOL]) + _value(Metadata) + _NEW
    yield _value("planner_data") + _value(dict(paths))  # the only value that uses many numbers
    names = [name for name, *_ in plan.tensors]
    shared: list[Any] = [
        torch.Size,
        ChunkStorageMetadata,
        MetadataIndex,
        _StorageInfo,
        TensorStorageMetadata,
    ]
    shared += ["offsets", "sizes", "fqn", "offset", "index", "relative_path", "length"]
    shared += ["properties", "size", "chunks", *files, *names]
    numbers = {value: number for number, value in enumerate(dict.fromkeys(shared), _FIRST)}
    for value, number in numbers.items():
        yield _value(value) + op.LONG_BINPUT + struct.pack("<I", number) + op.POP
    rows = _Rows(plan, places, lambda value: op.LONG_BINGET + struct.pack("<I", numbers[value]))
    of_names = torch.tensor([numbers[name] for name in names], dtype=torch.int32)
    of_files = torch.tensor([numbers[file] for file in files], dtype=torch.int32)
    yield _value("storage_data") + op.EMPTY_DICT
    for dims in rows.all_dims:
        yield op.MARK + rows.places(dims, of_names, of_files) + op.SETITEMS
    yield _value("state_dict_metadata") + op.EMPTY_DICT + op.MARK
    for dims in rows.all_dims:
        yield from rows.tensors(dims)
    yield op.SETITEMS
    yield _value("storage_meta") + _value(StorageMeta())
    yield _value("version") + _value("1.0.0")  # of DCP's format
    yield op.SETITEMS + op.BUILD + op.STOP


_NEW = op.EMPTY_TUPLE + op.NEWOBJ + op.EMPTY_DICT + op.MARK
"""After a class: make an instance, and begin the dict of its attributes."""


class _Rows:
    """The rows of the chunks.

    Args:
        plan, places: see `encode_layout`.
        get: returns the pickle operation that reads a memoized value.
    """

    def __init__(self, plan: GlobalPlan, places: Tensor, get: Get) -> None:
        self._plan = plan
        self._places = places
        self._get = get
        self._dims = torch.tensor([len(shape) for *_, shape in plan.tensors], dtype=torch.int64)
        self.all_dims = sorted(set(self._dims.tolist()))

    def places(self, dims: int, names: Tensor, files: Tensor) -> bytes:
        """Return keys and values: the place of each chunk.

        Args:
            dims: of the tensors.
            names, files: the numbers under which each tensor's name and each rank's file are
                remembered.
        """
        plan, own = self._plan, self._of(dims)
        starts, lengths = self._places[:, own]
        index: dict[str, list[Part]] = {
            "fqn": [op.LONG_BINGET, names[plan.numbers[own]]],
            "offset": self._size(plan.offsets[own, :dims]),
            "index": [op.NONE],
        }
        place: dict[str, list[Part]] = {
            "relative_path": [op.LONG_BINGET, files[plan.writers[own]]],
            "offset": _integers(starts),
            "length": _integers(lengths),
        }
        row = [*self._object(MetadataIndex, index), *self._object(_StorageInfo, place)]
        return _table(row, len(own))

    def tensors(self, dims: int) -> Iterator[bytes]:
        """Yield keys and values: each tensor's description, with its chunks."""
        plan, own = self._plan, self._of(dims)
        chunk = {
            "offsets": self._size(plan.offsets[own, :dims]),
            "sizes": self._size(plan.sizes[own, :dims]),
        }
        table = _table(self._object(ChunkStorageMetadata, chunk), len(own))
        width = len(table) // max(1, len(own))
        counts = plan.numbers.bincount(minlength=len(plan.tensors)).tolist()
        at = 0
        for number in (self._dims == dims).nonzero().flatten().tolist():
            name, dtype, shape = plan.tensors[number]
            chunks = table[at : (at := at + width * counts[number])]
            described: dict[str, list[Part]] = {
                "properties": [_value(TensorProperties(dtype=getattr(torch, dtype)))],
                "size": [_value(torch.Size(shape))],
                "chunks": [op.EMPTY_LIST, op.MARK, chunks, op.APPENDS],
            }
            row = [self._get(name), *self._object(TensorStorageMetadata, described)]
            yield b"".join(part for part in row if isinstance(part, bytes))

    def _of(self, dims: int) -> Tensor:
        return (self._dims[self._plan.numbers] == dims).nonzero().flatten()

    def _size(self, columns: Tensor) -> list[Part]:
        """Return a torch.Size of each row of numbers."""
        parts: list[Part] = [self._get(torch.Size), op.MARK]
        for column in columns.unbind(1):
            parts += _integers(column)
        return [*parts, op.TUPLE + op.TUPLE1 + op.REDUCE]

    def _object(self, kind: type, attributes: Mapping[str, list[Part]]) -> list[Part]:
        parts: list[Part] = [self._get(kind), _NEW]
        for name, value in attributes.items():
            parts += [self._get(name), *value]
        return [*parts, op.SETITEMS + op.BUILD]


def _value(value: Any) -> bytes:
    """Return what makes a value: its pickle without the beginning and the end."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]


def _integers(column: Tensor) -> list[Part]:
    if column.numel() and int(column.max()) >> 31:
        return [op.LONG1 + b"\x08", column]
    return [op.BININT, column.to(torch.int32)]


def _table(row: list[Part], count: int) -> bytes:
    """Return the bytes of all rows, one after the other."""
    columns = []
    for part in row:
        if isinstance(part, bytes):
            columns.append(torch.frombuffer(bytearray(part), dtype=torch.uint8).expand(count, -1))
        else:
            columns.append(part.contiguous().unsqueeze(1).view(torch.uint8))
    return bytes_of(torch.cat(columns, 1))
