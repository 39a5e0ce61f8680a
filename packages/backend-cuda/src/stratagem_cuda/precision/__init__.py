"""Precisions for NVIDIA GPUs; each class is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem_cuda.precision.bitsandbytes import BitsandbytesPrecision as BitsandbytesPrecision
    from stratagem_cuda.precision.float8 import Float8Precision as Float8Precision
    from stratagem_cuda.precision.float16 import Float16Mixed as Float16Mixed
    from stratagem_cuda.precision.mxfp8 import MXFP8Precision as MXFP8Precision
    from stratagem_cuda.precision.transformer_engine import (
        TransformerEnginePrecision as TransformerEnginePrecision,
    )

_MODULES = {
    "BitsandbytesPrecision": "bitsandbytes",
    "Float16Mixed": "float16",
    "Float8Precision": "float8",
    "MXFP8Precision": "mxfp8",
    "TransformerEnginePrecision": "transformer_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
