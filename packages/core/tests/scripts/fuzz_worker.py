"""Opens the checkpoints whose paths come in, each in a process of its own with limits.

Prints a line of JSON for each: what became of verifying, loading, and loading without checksums;
by how much the address space had grown at its largest (`VmPeak`, so that memory counts which was
asked for and never used), and how long it took.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import StratagemError

SECONDS = 20
# More than any case may take; what asks for more than this is stopped before the machine is.
ADDRESS_SPACE = 4 << 30


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def same(one: Any, other: Any) -> bool:
    """Whether two data are equal, tensors bit for bit where they are plain."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if one.layout is not torch.strided or one.is_meta or one.numel() > 1 << 24:
            return True
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        # A load makes plain dicts of all kinds.
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def outcome(call: Any) -> tuple[str, Any]:
    """Return what became of a call: "", or what is wrong with its error; and its result."""
    try:
        return "", call()
    except StratagemError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "alloc" in str(cause):
                return f"out of memory: {cause!r:.500}", None
            cause = cause.__cause__
        return f"refused: {error!s:.500}", None
    except BaseException as error:
        return f"bare {type(error).__name__}: {error!s:.500}", None


def examine(path: str, original: Any) -> dict[str, Any]:
    size = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
    begin = time.perf_counter()
    unchecked, _ = outcome(lambda: SingleFileCheckpointIO(verify=False).load_checkpoint(path))
    verified, _ = outcome(lambda: SingleFileCheckpointIO().verify_checkpoint(path))
    loaded, contents = outcome(lambda: SingleFileCheckpointIO().load_checkpoint(path))
    told: dict[str, Any] = {
        "grown": status("VmPeak") - size,
        "seconds": time.perf_counter() - begin,
        "unchecked": unchecked,
        "verified": verified,
        "loaded": loaded,
    }
    if not loaded:
        told["is_original"] = same(contents, original)
        if Path(path).is_file():
            # Where torch's own reader takes the file too, it sees the same.
            try:
                by_torch = torch.load(path, weights_only=True)
            except Exception:
                by_torch = contents
            if not same(contents, by_torch):
                told["as_torch"] = [
                    f"{one!r:.200} is to torch.load {other!r:.200}"
                    for one, other in zip(contents.items(), by_torch.items(), strict=False)
                    if not same([*one], [*other])
                ]
    return told


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    originals: dict[str, Any] = {}
    for line in sys.stdin:
        path, base = json.loads(line)
        if base not in originals:
            originals[base] = SingleFileCheckpointIO().load_checkpoint(base)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            signal.alarm(SECONDS)
            try:
                told = examine(path, originals[base])
                os.write(write, json.dumps(told).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()
        _, ended = os.waitpid(child, 0)
        if not text:
            text = json.dumps({"ended": f"ended with {ended} and said nothing"}).encode()
        sys.stdout.write(text.decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
