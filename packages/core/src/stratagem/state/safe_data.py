"""Weights-only-safe data: what can be stored and sent so that reading it back executes nothing.

Here they are checked before a save, packed for other ranks and for the launching process, and
searched for weights that are not finite.

`check_safe_data` says what they are.
"""

from __future__ import annotations

import ctypes
import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    ConfigurationError,
    format_value,
)

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)
# Copying an expanded tensor of up to this many bytes does no harm.
_FREE_SIZE = 64 << 20
_FREE_VALUES = 10_000_000
# So often may tensors and lists be shared: a model's layers may all have the same weights.
_MOST_SHARED = 64
_DEEPEST = 256
_TORCH = (torch.Size, torch.dtype, torch.device)
# A subclass is saved under its own name, which `weights_only` does not read; an nn.Buffer is a
# torch.Tensor.
_TENSORS = (Tensor, torch.nn.Parameter)


def find_offending_value(data: Any, path: str = "") -> str | None:
    """Return the path and type of the first unsafe value in `data`, or None.

    Args:
        data: anything.
        path: the name of `data` in the result, such as "checkpoint".

    Example:
        >>> from stratagem.state.safe_data import find_offending_value
        >>> find_offending_value({"rate": 0.1, "seen": range(3)}, "checkpoint")
        "checkpoint['seen'] is of type builtins.range"
    """
    try:
        return _find_offending_value(data, path)
    except RecursionError:
        return f"{path or 'it'} contains itself or is nested too deeply"


def _find_offending_value(data: Any, path: str) -> str | None:
    kind = type(data)
    if kind in _LEAVES or kind in _TORCH or kind in _TENSORS:
        return None
    if kind in (dict, OrderedDict, Counter):
        for key, value in data.items():
            found = _find_offending_value(key, f"{path} (a key)") or _find_offending_value(
                value, f"{path}[{key!r}]"
            )
            if found:
                return found
        return None
    if kind in (list, tuple, set):
        for index, value in enumerate(data):
            if found := _find_offending_value(value, f"{path}[{index}]"):
                return found
        return None
    # A tensor of another class can be read if its class was registered as safe. Importing
    # torch.distributed.tensor registers DTensor.
    if isinstance(data, Tensor) and kind in torch.serialization.get_safe_globals():
        return None
    return f"{path or 'it'} is of type {kind.__module__}.{kind.__qualname__}"


def find_oversized(data: Any, path: str = "") -> str | None:
    """Return a description of data that would grow far beyond its stored size, or None.

    Such data are small in a file and in memory, until somebody copies them or goes through them: a
    tensor that was expanded (`torch.zeros(1).expand(2**40)`), tensors that share all of their
    elements, lists that hold the same list many times over. Data that contain themselves, or are
    nested more than 256 deep, count among them.
    """
    extent = _Extent()
    try:
        values, size = extent.of(data, _DEEPEST)
        stored = sum(extent.storages.values())
        if size > _FREE_SIZE + _MOST_SHARED * stored:
            return f"{path or 'it'} has tensors of {size} bytes, of which only {stored} are stored"
        if values > _FREE_VALUES + _MOST_SHARED * extent.values:
            return f"{path or 'it'} repeats its {extent.values} values {values} times in all"
    except _Oversized as error:
        return f"{path or 'it'}{''.join(reversed(error.place))} {error.what}"
    return None


class _Oversized(Exception):
    def __init__(self, what: str) -> None:
        self.what = what
        self.place: list[str] = []


class _Extent:
    """The size of data if repeated references count each time.

    Attributes:
        values: the number of distinct values.
        storages: the size of each storage in bytes, by address.
    """

    def __init__(self) -> None:
        self.values = 0
        self.storages: dict[int, int] = {}
        self._known: dict[int, tuple[int, int]] = {}

    def of(self, data: Any, levels: int) -> tuple[int, int]:
        """Return how many values `data` are, and how many bytes its tensors have."""
        kind = type(data)
        if kind in _TENSORS:
            return 1, self._of_tensor(data)
        if not isinstance(data, (dict, list, tuple)) or kind is torch.Size:
            return 1, 0
        if (known := self._known.get(id(data))) is not None:
            return known
        if not levels:
            raise _Oversized("contains itself or is nested too deeply")
        values = size = 0
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            try:
                more_values, more_size = self.of(value, levels - 1)
            except _Oversized as error:
                error.place.append(f"[{format_value(key)}]" if levels > _DEEPEST - 8 else "")
                raise
            values += more_values
            size += more_size
        self.values += len(data) + 1
        self._known[id(data)] = extent = values + 1, size
        return extent

    def _of_tensor(self, tensor: Tensor) -> int:
        # Only a plain tensor stores exactly its elements.
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
            return 0
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        stored = storage.nbytes()
        if size > _FREE_SIZE and size > stored:
            raise _Oversized(f"is a tensor of {size} bytes, of which only {stored} are stored")
        self.storages[storage.data_ptr()] = stored
        return size


def encode(data: Any) -> Tensor:
    """Return weights-only-safe data as a tensor of bytes, to be sent to other ranks.

    Raises:
        TypeError: the data contain an object that is not weights-only-safe; the message has its
            place.
    """
    if offending_value := find_offending_value(data):
        raise TypeError(
            "only weights-only-safe data (numbers, strings, tensors, and dicts, lists, tuples and "
            f"sets of them) can be sent to other ranks, but {offending_value}: convert it first"
        )
    return torch.frombuffer(bytearray(_saved(data).getbuffer()), dtype=torch.uint8)


def _saved(data: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer


def decode(encoded: Tensor, name: str = "what a rank has sent") -> Any:
    """Decode the output of `encode` without executing anything; tensors are on the CPU.

    Args:
        encoded: bytes.
        name: the name of the data in errors.

    Raises:
        CheckpointCorruptError: the data are not an output of `encode`.
    """
    from stratagem.state.reading.archive import load_archive

    # Of its own, since the tensors in it are views.
    memory = encoded.cpu().clone(memory_format=torch.contiguous_format).untyped_storage()
    return load_archive(memory, name, start=0, size=memory.nbytes())


def pack_result(result: Any) -> bytes:
    """Return the result of a rank's function as bytes, for `unpack_result`.

    Raises:
        ConfigurationError: the result is not weights-only-safe data; the message has the place.

    Example:
        >>> from stratagem.launch import pack_result, unpack_result
        >>> unpack_result(pack_result({"losses": [0.5, 0.25]}))
        {'losses': [0.5, 0.25]}
    """
    if offending_value := find_offending_value(result):
        raise ConfigurationError(
            "what the launched function returns comes back from another process, as "
            "weights-only-safe data (numbers, strings, tensors, and dicts, lists, tuples and sets "
            f"of them), but {offending_value}: return model.state_dict() in the place of a model, "
            "or save a checkpoint"
        )
    return _saved(result).getvalue()


def unpack_result(data: bytes) -> Any:
    """Decode the output of `pack_result` without executing anything; tensors are on the CPU.

    Raises:
        CheckpointCorruptError: the data are not an output of `pack_result`.
    """
    return from_bytes(data, "what rank 0 has returned")


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in row-major order."""
    tensor = tensor.cpu().contiguous()
    # Not by way of numpy, without which torch may be installed.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def why_refused(contents: Any) -> str:
    """Return why contents cannot be saved, or "" if they can.

    Contents are rejected if loading would execute code, or would take far more memory than the size
    of the file.

    Returns:
        The offending value, and a replacement for it.
    """
    if offending_value := find_offending_value(contents, "checkpoint"):
        return (
            f"{offending_value}, which could not be loaded without executing code. "
            "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
        )
    if oversized := find_oversized(contents, "checkpoint"):
        return f"{oversized}. Store the tensor before it was expanded"
    return ""


def check_safe_data(data: Any, name: str | Path) -> None:
    """Check that data are weights-only-safe: a checkpoint may hold them, and loading runs no code.

    Weights-only-safe data are None, bool, int, float, complex, str, bytes and bytearray (also empty
    ones), `torch.Tensor` and `nn.Parameter`, `torch.Size`, `torch.dtype` and `torch.device`, and
    dict, OrderedDict, Counter, list, tuple and set of them; the keys of a dict too. Other types and
    subclasses are not, such as NumPy arrays and scalars, dataclasses, enums, frozensets, named
    tuples and paths. Tensors may share memory, and share it again after a load. Data nested
    more than 256 deep, and tensors far larger than their memory (`expand`), raise an error.

    Args:
        data: such as a checkpoint, or the return value of `Strategy.state`.
        name: the name of the target of the save in the error, such as its path.

    Raises:
        CheckpointContentError: the message names the entry, such as `checkpoint['rates'][0]`, and
            its type.

    Example:
        >>> from stratagem.state import check_safe_data
        >>> check_safe_data({"seen": {1, 2}, ("a", 1): b""}, "a.ckpt")
        >>> check_safe_data({"seen": range(3)}, "a.ckpt")
        Traceback (most recent call last):
        stratagem.errors.CheckpointContentError: cannot save a.ckpt: checkpoint['seen'] is of ...
    """
    if why := why_refused(data):
        raise CheckpointContentError(f"cannot save {name}: {why}")


def to_bytes(data: Any, name: str | Path) -> bytes:
    """Return weights-only-safe data as bytes, for `from_bytes`; checks them first.

    Args:
        data, name: as for `check_safe_data`.

    Raises:
        CheckpointContentError: as `check_safe_data` does.

    Example:
        >>> from stratagem.state import from_bytes, to_bytes
        >>> from_bytes(to_bytes({"seen": {1, 2}, "empty": b""}, "a.ckpt"), "a.ckpt")
        {'seen': {1, 2}, 'empty': b''}
    """
    check_safe_data(data, name)
    return _saved(data).getvalue()


def from_bytes(stored: bytes, name: str | Path) -> Any:
    """Decode the output of `to_bytes` without executing anything; tensors are on the CPU.

    It accepts the data that `torch.load(weights_only=True)` accepts, and raises on empty bytes.

    Args:
        stored: the output of `to_bytes` or `torch.save`.
        name: the name of the data in errors.

    Raises:
        CheckpointCorruptError: the data are not an output of `to_bytes`, or are damaged.
    """
    if not stored:
        raise CheckpointCorruptError(f"{str(name)!r} was refused: it is empty")
    loaded = decode(torch.frombuffer(bytearray(stored), dtype=torch.uint8), str(name))
    if oversized := find_oversized(loaded, "checkpoint"):
        raise CheckpointCorruptError(f"{str(name)!r} was refused: {oversized}")
    return loaded
