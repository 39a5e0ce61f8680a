"""A folder of safetensors: its index, the headers of its files, and its tensors, which stay there.

A file of the format is eight bytes (the length of the header), the header (JSON: dtype, shape and
place of each tensor by name), and the bytes of the tensors. Tensors are read with plain reads into
memory that exists already: pages of a mapped file would count as memory of the rank.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from stratagem.checkpoint import LazyTensor, Shards, load_json
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    format_names,
    format_text,
)
from stratagem.storage import is_url

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of the format, by their names in a header."""
_LONGEST_HEADER = 100_000_000
# Rows of which a part is needed are read in blocks of this size.
_BLOCK = 8 << 20
_OTHER_FORMS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


def bytes_in(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which may be written to.

    The memory is valid as long as the tensor lives.

    Example:
        >>> import torch
        >>> tensor = torch.tensor([1, 2], dtype=torch.uint8)
        >>> bytes_in(tensor).tolist()
        [1, 2]
    """
    # Not by way of numpy, without which torch may be installed, and which lacks dtypes.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


class StoredTensor(LazyTensor):
    """A tensor in a safetensors file.

    Args:
        path: the file.
        start: the position of its first byte.
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.path, self.start = path, start
        self.shape, self.dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def read_into(self, target: Tensor | Shards) -> None:
        """Fill a tensor of this shape, or chunks of one, from the file.

        Raises:
            CheckpointCorruptError: the file became shorter.
        """
        chunks = target.chunks if isinstance(target, Shards) else [((0,) * target.ndim, target)]
        with self.path.open("rb", buffering=0) as file:
            for offsets, chunk in chunks:
                if chunk.numel():
                    self._read_chunk(file, offsets, chunk.detach())

    def equals(self, other: StoredTensor) -> bool:
        """Return whether another stored tensor has equal bytes, read in blocks."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        with self.path.open("rb") as own, other.path.open("rb") as others:
            own.seek(self.start)
            others.seek(other.start)
            left = self.nbytes
            while left > 0:
                if own.read(min(left, _BLOCK)) != others.read(min(left, _BLOCK)):
                    return False
                left -= _BLOCK
        return True

    def _read_chunk(self, file: BinaryIO, offsets: tuple[int, ...], chunk: Tensor) -> None:
        if not self.shape:
            self._read_rows(file, 0, chunk.view(1))
            return
        row, inner = self.shape[1:], chunk.shape[1:]
        if tuple(inner) == row:
            self._read_rows(file, offsets[0] * prod(row), chunk)
            return
        within = [slice(None)]
        within += [slice(o, o + size) for o, size in zip(offsets[1:], inner, strict=True)]
        at_once = max(1, _BLOCK // (prod(row) * self.dtype.itemsize))
        for first in range(0, len(chunk), at_once):
            part = chunk[first : first + at_once]
            rows = torch.empty(len(part), *row, dtype=self.dtype)
            self._read_rows(file, (offsets[0] + first) * prod(row), rows)
            part.copy_(rows[tuple(within)])

    def _read_rows(self, file: BinaryIO, first: int, rows: Tensor) -> None:
        """Read elements from the number `first` on, as many as a tensor has."""
        place = self.start + first * self.dtype.itemsize
        if rows.dtype == self.dtype and rows.device.type == "cpu" and rows.is_contiguous():
            self._read_bytes(file, place, bytes_in(rows))
            return
        at_once = max(1, _BLOCK * len(rows) // (rows.numel() * self.dtype.itemsize))
        for begin in range(0, len(rows), at_once):
            part = rows[begin : begin + at_once]
            values = torch.empty(part.shape, dtype=self.dtype)
            self._read_bytes(file, place, bytes_in(values))
            part.copy_(values)
            place += values.nbytes

    def _read_bytes(self, file: BinaryIO, place: int, memory: memoryview) -> None:
        file.seek(place)
        while len(memory):
            count = file.readinto(memory)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(
                    f"{str(self.path)!r} ends before byte {place + len(memory)}, which its header "
                    "names: the file was truncated; copy it again"
                )
            memory = memory[count:]


def open_folder(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name; only headers are read.

    Args:
        path: a folder with "model.safetensors", or with several files and their index; or one
            file.

    Raises:
        CheckpointNotFoundError: the folder does not exist.
        CheckpointError: the folder lacks safetensors, their index, or a file that the index names.
        CheckpointCorruptError: the index or a header has another form.
    """
    folder = Path(path).expanduser()
    if is_url(os.fspath(path)) or not folder.exists():
        raise CheckpointNotFoundError(
            f"{os.fspath(path)!r} is no folder on this machine: expected one with {SINGLE} or "
            f"{INDEX}. Download a model of the Hub first: hf download NAME --local-dir FOLDER"
        )
    if folder.is_file():
        return read_header(folder)
    index = folder / INDEX
    if index.exists():
        return _open_indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE) in files:
        files = [folder / SINGLE]
    if [file.name for file in files] == ["adapter_model.safetensors"]:
        raise CheckpointError(
            f"{str(folder)!r} has the weights of an adapter, and not of a model: pass the folder "
            "of the base model; to load the adapter, copy its adapter_config.json too"
        )
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise CheckpointError(
            f"{str(folder)!r} has {len(files)} safetensors files ({format_names(_names(files))}) "
            f"and no {INDEX}, so that a missing file would not be noticed: copy the index too"
        )
    others = sorted(path for form in _OTHER_FORMS for path in folder.glob(form))
    found = f"has {format_names(_names(others))}" if others else "has no weights"
    raise CheckpointError(
        f"{str(folder)!r} {found}; expected {SINGLE}, or several files with {INDEX}. Convert other "
        "formats with transformers: AutoModel.from_pretrained(FOLDER).save_pretrained(NEW)"
    )


def _names(files: list[Path]) -> list[str]:
    return [file.name for file in files]


def _open_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = load_json(index.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is empty")
        if not all(type(file) is str and Path(file).name == file for file in weight_map.values()):
            raise ValueError("weight_map has other values than names of files")
    except (ValueError, KeyError, RecursionError, OSError) as error:
        raise CheckpointCorruptError(
            f"{str(index)!r} is no index of safetensors ({format_text(str(error))}): expected "
            '{"weight_map": {NAME: FILE}}; copy it again'
        ) from error
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{str(index)!r} names {format_names(missing)}, which the folder lacks: copy all "
            f"{len(names)} files"
        )
    files = {name: read_header(folder / name) for name in names}
    if absent := [name for name, file in weight_map.items() if name not in files[file]]:
        raise CheckpointCorruptError(
            f"{str(index)!r} names {format_names(absent)}, which the file of each lacks: the index "
            "and the files belong to different saves; copy them again"
        )
    return {name: files[file][name] for name, file in weight_map.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        CheckpointFormatError: a tensor has an unknown dtype.
        CheckpointCorruptError: the file has another form, or was truncated.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = load_json(file.read(length))
            header.pop("__metadata__", None)
            begin = 8 + length
            tensors = {n: _stored(path, begin, size, entry) for n, entry in header.items()}
            _check_apart(tensors)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{str(path)!r} is not a whole safetensors file ({format_text(str(error))}): it "
                "may be truncated, or a pointer of Git LFS; copy it again"
            ) from error
    return tensors


def _check_apart(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes, as the format does."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise ValueError(f"{name} shares bytes with another tensor")
        end = tensor.start + tensor.nbytes


def _stored(path: Path, begin: int, size: int, entry: Mapping[str, Any]) -> StoredTensor:
    shape, (first, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)):
        raise ValueError("a size is no number")
    if entry["dtype"] not in DTYPES:
        raise CheckpointFormatError(
            f"{str(path)!r} has tensors of {format_text(str(entry['dtype']))}; expected one of "
            f"{', '.join(DTYPES)}. Write it in another dtype first"
        )
    stored = StoredTensor(path, begin + first, tuple(shape), DTYPES[entry["dtype"]])
    if end - first != stored.nbytes or begin + end > size:
        raise ValueError(f"a tensor from byte {first} to {end} in a file of {size}")
    return stored
