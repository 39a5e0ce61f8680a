"""Weights as a safetensors file, which is written here and read by everybody's library.

The format (https://github.com/huggingface/safetensors) is 8 bytes that say how long the header is,
the header in JSON, and the tensors' bytes one after another. The library would write them to a file
that can be torn by a kill; here they go through a `DurableFile`, and nothing has to be installed.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stratagem.errors import CheckpointContentError
from stratagem.storage.local import DurableFile

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Write tensors by name; return the file's size in bytes.

    Tensors that share memory are written each for itself. What is at the path is replaced, once the
    new file is durable.

    Raises:
        CheckpointContentError: the format knows no such tensor; says which.
        OSError: the file system refused.
    """
    # The largest elements first, so that each tensor lies as its elements want it.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise CheckpointContentError(
                f"cannot write {str(path)!r}: {name} is a tensor of {tensor.dtype} "
                f"({tensor.layout}); a safetensors file takes dense ones of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with DurableFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            # Resolved, so that the bytes are the numbers.
            tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            size = tensor.numel() * tensor.element_size()
            if size:
                # Not by way of numpy, which has no bfloat16, and may not be installed.
                memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
                file.write(memoryview(memory).cast("B"))
        file.commit()
    return 8 + len(text) + end
