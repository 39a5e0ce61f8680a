"""What an archive of `torch.save` holds, read from memory; nothing is executed, or copied."""

from __future__ import annotations

import ctypes
import pickle
import sys
from types import FunctionType
from typing import Any

import torch

from stratagem.checkpoint.archive import not_whole, refused
from stratagem.checkpoint.entries import Entry, Refused, read_entries
from stratagem.errors import CheckpointCorruptError, format_text, format_value
from stratagem.state.reading.rebuild import ArchiveUnpickler, Stored


def load_archive(
    memory: torch.UntypedStorage, path: str, *, start: int, size: int, comment: int = 0
) -> Any:
    """Return the contents of an archive; its tensors are views of the archive's memory.

    Args:
        memory: the memory that contains the archive, on the CPU.
        path: the name of the archive in errors.
        start, size: the position of the archive, in bytes.
        comment: the number of bytes after the end record of the archive.

    Raises:
        CheckpointCorruptError: the data are not a complete archive of weights-only-safe data.
    """
    # The same memory: the checked bytes are the loaded ones.
    octets = (ctypes.c_uint8 * size).from_address(memory.data_ptr() + start)
    octets.owner = memory  # type: ignore[attr-defined]
    contents = memoryview(octets).cast("B")
    try:
        entries = read_entries(contents, comment=comment)
    except Refused as error:
        raise refused(path, error) from error
    if "data.pkl" not in entries:
        raise not_whole(path, size, "it has no entry 'data.pkl'")
    data, order = (
        bytes(contents[entry.offset : entry.offset + entry.size])
        for entry in (entries["data.pkl"], entries.get("byteorder", Entry(0, 0)))
    )
    swaps = (order or b"little") != sys.byteorder.encode()

    def read_storage(key: str, wanted: int, dtype: torch.dtype) -> torch.UntypedStorage:
        entry = entries.get(f"data/{key}", Entry(0, 0))
        if wanted > entry.size:
            raise Refused(
                f"its storage {format_value(key)} has {entry.size} bytes, expected {wanted}"
            )
        begin = start + entry.offset
        storage: torch.UntypedStorage = memory[begin : begin + wanted]
        if storage.data_ptr() % max(1, dtype.itemsize):
            # As its elements want it.
            storage = storage.clone()  # type: ignore[no-untyped-call]
        if swaps:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        return storage

    return _unpickle(ArchiveUnpickler(data, read_storage), path, size)


def _unpickle(unpickler: ArchiveUnpickler, path: str, size: int) -> Any:
    try:
        loaded = unpickler.load()
        _check_values(loaded)
    except pickle.UnpicklingError as error:
        raise CheckpointCorruptError(
            f"{path!r} holds something that loading would have to execute, so it was "
            f"refused: {format_text(str(error))}. Only load checkpoints of weights-only-safe data"
        ) from error
    except Refused as error:
        raise refused(path, error) from error
    except MemoryError as error:
        raise CheckpointCorruptError(
            f"{path!r} was refused: loading its {size} bytes would take more memory than there is"
        ) from error
    # The errors of unpickler and torch for damaged contents are not documented.
    except Exception as error:
        raise not_whole(path, size, f"{type(error).__name__}: {format_text(str(error))}") from error
    return loaded


def _check_values(loaded: Any) -> None:
    """Refuse a storage, or what makes a value, that is there for itself.

    Both are ours, and are not what the pickle names.
    """
    seen, left = set(), [loaded]
    while left:
        data = left.pop()
        if isinstance(data, (dict, list, tuple)):
            if id(data) not in seen:
                seen.add(id(data))
                left.extend(data.values() if isinstance(data, dict) else data)
        elif type(data) in (FunctionType, Stored):
            raise Refused("it holds what tensors are made of, in place of tensors")
