"""Plain data: what can be stored and sent so that reading it back executes nothing.

Plain data are None, bool, int, float, complex, str, bytes, tensors, and dicts, lists, tuples and
sets of them: what `torch.load(weights_only=True)` accepts from any version of torch.
"""

from __future__ import annotations

import ctypes
import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from stratagem.errors import CheckpointContentError

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)
# An expanded tensor of up to so many bytes does no harm when it is copied.
_FREE_SIZE = 64 << 20
_TORCH = (torch.Size, torch.dtype, torch.device)
# A subclass is saved under its own name, which `weights_only` does not read; an nn.Buffer is a
# torch.Tensor.
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def find_offending_value(data: Any, path: str = "") -> str | None:
    """Return which value in `data` is not plain data, and its type; None if all of it is.

    Args:
        data: anything.
        path: what the answer calls `data`, such as "checkpoint".

    Example:
        >>> from stratagem.state.plain_data import find_offending_value
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
    # A tensor of another class can be read where its class was registered as safe, as that of
    # torch.distributed.tensor is.
    if isinstance(data, torch.Tensor) and kind in torch.serialization.get_safe_globals():
        return None
    return f"{path or 'it'} is of type {kind.__module__}.{kind.__qualname__}"


def find_oversized(data: Any, path: str = "") -> str | None:
    """Return which tensor in plain data is far larger than its storage; None if there is none.

    Such a tensor (`torch.zeros(1).expand(2**40)`) is small in a file and in memory, until the first
    copy of it.
    """
    if isinstance(data, torch.Tensor):
        # Only a plain tensor's elements are what its storage holds.
        if data.layout is not torch.strided or type(data) not in (torch.Tensor, torch.nn.Parameter):
            return None
        size = data.numel() * data.element_size()
        if size <= _FREE_SIZE or size <= (stored := data.untyped_storage().nbytes()):
            return None
        return f"{path or 'it'} is a tensor of {size} bytes, of which only {stored} are stored"
    if isinstance(data, dict):
        for key, value in data.items():
            if found := find_oversized(value, f"{path}[{key!r}]"):
                return found
    elif isinstance(data, (list, tuple)) and not isinstance(data, torch.Size):
        for index, value in enumerate(data):
            if found := find_oversized(value, f"{path}[{index}]"):
                return found
    return None


def encode(data: Any) -> torch.Tensor:
    """Return plain data as a tensor of bytes, to be sent to other ranks.

    Raises:
        TypeError: something in it is not plain data; says where.
    """
    if offending_value := find_offending_value(data):
        raise TypeError(
            f"only plain data (numbers, strings, tensors, and dicts, lists, tuples and sets of "
            f"them) can be sent to other ranks: {offending_value}"
        )
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def decode(encoded: torch.Tensor) -> Any:
    """Return the plain data that `encode` made, tensors on the CPU; nothing in it is executed."""
    return torch.load(io.BytesIO(bytes_of(encoded)), map_location="cpu", weights_only=True)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in row-major order."""
    tensor = tensor.cpu().contiguous()
    # Not by way of numpy, without which torch may be installed.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def why_refused(contents: Any) -> str:
    """Return why contents may not be saved; "": they may.

    They may not where loading would execute code, or take far more memory than the file is large.

    Returns:
        The offending value, and what to store in its place.
    """
    if offending_value := find_offending_value(contents, "checkpoint"):
        return (
            f"{offending_value}, which could not be loaded without executing code. "
            "Store numbers, strings, tensors, and dicts, lists, tuples and sets of them"
        )
    if oversized := find_oversized(contents, "checkpoint"):
        return f"{oversized}. Store the tensor before it was expanded"
    return ""


def check_contents(checkpoint: Any, path: str | Path) -> None:
    """Refuse what `why_refused` says.

    Raises:
        CheckpointContentError: says where it is.
    """
    if why := why_refused(checkpoint):
        raise CheckpointContentError(f"cannot save {path}: {why}")
