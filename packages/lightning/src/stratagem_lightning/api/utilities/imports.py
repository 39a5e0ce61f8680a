"""What libraries ask of the machine and of versions before they import something."""

from __future__ import annotations

import platform
import sys

import torch
from packaging.version import Version

_IS_WINDOWS = platform.system() == "Windows"
_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)
_PYTHON_GREATER_EQUAL_3_10_0 = _NUMPY_AVAILABLE = True
_PREFIX = "_TORCH_GREATER_EQUAL_"


def __getattr__(name: str) -> bool:
    """Return whether torch has at least the version in a name, such as "..._EQUAL_2_4"."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    asked = name.removeprefix(_PREFIX).replace("_", ".")
    return Version(torch.__version__).release >= Version(asked).release
