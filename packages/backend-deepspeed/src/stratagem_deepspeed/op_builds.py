"""DeepSpeed's compiled ops: built once, before ranks start, with progress shown.

DeepSpeed compiles an op where it is first used: on every rank, minutes long, without a word, and
waiting forever for the lock file of a build that was killed. Here a process of its own builds it
into torch's folder for extensions, which outlives the run; the ranks then only load it.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem_deepspeed.ops import OPS, compiler, folder_of, mark_of, what_is_missing

BUILD = """
import sys
from deepspeed.ops.op_builder import {builder}
{builder}().load(verbose=True)
"""

_LOCK_IS_OLD = 60.0
"""Seconds after which a lock file of torch's without a live process counts as stale."""


def build(name: str, device_type: str) -> None:
    """Build an op, unless its build exists; print a line of progress each second.

    Raises:
        ConfigurationError: a compiler or a library is missing (with the command that installs it),
            or the build failed (with its last lines).
    """
    folder, mark = Path(folder_of(name)), Path(mark_of(name))
    if mark.exists() and (folder / f"{name}.so").exists():
        with _one_builder(folder):
            _remove_old_lock(folder)  # loading it would wait for that, too
        return
    missing = what_is_missing(name, has_header=_compiles)
    if missing:
        raise ConfigurationError(f"DeepSpeed's op {name!r} cannot be built here: {missing}")
    folder.mkdir(parents=True, exist_ok=True)
    with _one_builder(folder):
        _remove_old_lock(folder)
        if mark.exists() and (folder / f"{name}.so").exists():
            return  # by another process, meanwhile
        _run_build(name, device_type)
        mark.touch()


def check_nvme_path(path: str) -> None:
    """Raise if a folder for NVMe offload cannot be written.

    Raises:
        ConfigurationError: the folder is missing, or not writable.
    """
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written ({error.strerror}): pass a folder on the "
            "NVMe device that you may write to"
        ) from error


def _compiles(header: str) -> bool:
    """Whether the compiler finds a header, wherever it looks."""
    done = subprocess.run(
        [compiler(), "-x", "c++", "-fsyntax-only", "-"],
        input=f"#include <{header}>\nint main() {{}}\n",
        text=True,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Hold a file lock while building; the kernel releases that of a process that dies."""
    with (folder / ".stratagem-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _remove_old_lock(folder: Path) -> None:
    """Remove the lock file of a build that was killed, for which torch would wait forever."""
    lock = folder / "lock"
    while lock.exists():
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > _LOCK_IS_OLD and not _is_worked_in(folder):
            print(
                f"stratagem: removed {lock}, left over by a build that did not end",
                file=sys.stderr,
                flush=True,
            )
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.2)


def _is_worked_in(folder: Path) -> bool:
    """Whether a process of this host works in a folder, as ninja and the compiler do."""
    wanted = folder.resolve()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == wanted:
                return True
        except OSError:
            continue  # another user's, or ended
    return False


def _run_build(name: str, device_type: str) -> None:
    op = OPS[name]
    began = time.monotonic()
    _say(f"building DeepSpeed's op {name!r} ({op.purpose}), once; this takes a few minutes")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device_type == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    environment.setdefault("MAX_JOBS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BUILD.format(builder=op.builder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        told = began
        while process.poll() is None:
            time.sleep(0.1)
            if time.monotonic() - told >= 10:
                told = time.monotonic()
                step = next((found for line in reversed(lines) if (found := _step(line))), "")
                _say(f"still building {name!r}{step}, {told - began:.0f} s so far")
        reader.join()
    if process.returncode != 0:
        tail = "".join(lines[-25:]).rstrip()
        raise ConfigurationError(
            f"DeepSpeed's op {name!r} ({op.purpose}) could not be built (exit code "
            f"{process.returncode}):\n{tail}\n"
            + (f"Mend that, or do without it, by {op.without}" if op.without else "Mend that")
            + _hint_at_architectures()
        )
    _say(f"built {name!r} in {time.monotonic() - began:.0f} s")


def _hint_at_architectures() -> str:
    """Return a hint at a list that torch reads, and DeepSpeed 0.19 does not; "": none."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if not re.search(r"\d[a-z]", listed):
        return ""
    return (
        f". DeepSpeed reads numbers such as 9.0 in TORCH_CUDA_ARCH_LIST, received {listed!r}: "
        "unset it"
    )


def _step(line: str) -> str:
    """Return ninja's "[2/5]" in a line of its output."""
    found = re.match(r"\[(\d+/\d+)\]", line)
    return f" (step {found[1]})" if found else ""


def _say(what: str) -> None:
    print(f"stratagem: {what}", file=sys.stderr, flush=True)
