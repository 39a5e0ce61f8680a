"""Which line of a stack is the user's, and which call of a library it is in."""

from __future__ import annotations

import os
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import FrameType


def _folders(package: str) -> tuple[str, ...]:
    spec = find_spec(package)
    return tuple(spec.submodule_search_locations or ()) if spec is not None else ()


_TORCH = _folders("torch")
_WORKING = (*_TORCH, *_folders("stratagem"), *_folders("stratagem_torch"))
"""The folders of torch and of this library, whose functions communicate."""
_LIBRARIES = (*_WORKING, str(Path(os.__file__).parent), "<frozen")
_COMMUNICATING = {"backward": "backward", "_pre_forward": "communication before forward"}
"""Functions of torch within which C++ may wait for other ranks, and what to call them. DDP brings
its buckets and buffers into line before a forward pass."""

IN_CALLS = tuple(_COMMUNICATING.values())
"""The names that `operation` returns for calls of torch that communicate within C++."""


def operation(frame: FrameType | None) -> str:
    """Return the collective, or else the call of torch or of this library, that a stack is in."""
    fallback = ""
    innermost = frame
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(("distributed_c10d.py", "_functional_collectives.py")):
            # wrapper is a decorator's; the public function lies around it
            if not name.startswith("_") and name != "wrapper":
                return name
        elif name in _COMMUNICATING and file.startswith(_TORCH):
            return _COMMUNICATING[name]
        elif not fallback and file.startswith(_WORKING) and not name.startswith("_"):
            fallback = name
        frame = frame.f_back
    if innermost is not None and not innermost.f_code.co_filename.startswith(_LIBRARIES):
        return f"{innermost.f_code.co_name}()"
    return fallback or "a call of a library"


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that belongs to no library."""
    outside = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            here = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            # multiprocessing runs a spawned process from <string>, as does `python -c`.
            if "site-packages" not in file and file != "<string>":
                return here
            outside = outside or here
        frame = frame.f_back
    return outside or "a line that is not known"


def line_in_traceback(error: BaseException) -> str:
    """Return the innermost line of a traceback, or of its callers, that belongs to no library."""
    found = None
    outermost = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        outermost = outermost or frame
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f"{file}:{number} in {frame.f_code.co_name}"
    if found is not None:
        return found
    return users_line(outermost)
