"""What a launched function returns, as bytes on the way from rank 0 to the launching process."""

from __future__ import annotations

import io
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.state import plain_data


def pack_result(result: Any) -> bytes:
    """Return what a rank's function has returned as bytes, for `unpack_result`.

    Raises:
        ConfigurationError: it is not plain data; says where.

    Example:
        >>> from stratagem.launch import pack_result, unpack_result
        >>> unpack_result(pack_result({"losses": [0.5, 0.25]}))
        {'losses': [0.5, 0.25]}
    """
    if offending_value := plain_data.find_offending_value(result):
        raise ConfigurationError(
            f"what the launched function returns comes back from another process, as plain data "
            f"(numbers, strings, tensors, and dicts, lists, tuples and sets of them), but "
            f"{offending_value}: return model.state_dict() in the place of a model, or save a "
            "checkpoint"
        )
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def unpack_result(data: bytes) -> Any:
    """Return what `pack_result` was given, tensors on the CPU; nothing in it is executed.

    Raises:
        CheckpointCorruptError: it is nothing that `pack_result` made.
    """
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return plain_data.decode(encoded, "what rank 0 has returned")
