"""Where a thread is, read from its stack: the operation that it waits in, and the user's line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
        *("all_to_all_single", "backward", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "monitored_barrier", "recv", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "send"),
    )
)
"""What a rank may be in when it waits for others; backward communicates under most strategies."""

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    sysconfig.get_path("stdlib"),
    "<frozen",
)


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
        elif name == "backward" and file.startswith(_LIBRARIES[0]):
            return "backward"
        elif not fallback and file.startswith(_LIBRARIES[:2]) and not name.startswith("_"):
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
            # What multiprocessing runs a spawned process by is called <string>, as is `python -c`.
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
