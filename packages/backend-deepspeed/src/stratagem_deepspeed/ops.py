"""DeepSpeed's compiled ops: built once, before ranks start, with progress shown.

DeepSpeed compiles an op where it is first used: on every rank, minutes long, without a word, and
waiting forever for the lock file of a build that was killed. Here a process of its own builds it
into torch's folder for extensions, which outlives the run; the ranks then only load it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem_deepspeed.library import installed_version

BUILD = """
import sys
from deepspeed.ops.op_builder import {builder}
{builder}().load(verbose=True)
"""

_LOCK_IS_OLD = 60.0
"""Seconds after which a lock file of torch's without a live process counts as stale."""


@dataclass(frozen=True)
class Op:
    """An op that strategies here may need.

    Attributes:
        builder: DeepSpeed's class.
        purpose: what it is for, in a few words.
        header: a C header that must be there, beside a compiler; "": none.
        needs_nvcc: whether it has kernels for GPUs, so that CUDA's compiler must be there.
        package: the Debian package that holds the header.
        without: how to do without the op.
    """

    builder: str
    purpose: str
    header: str = ""
    needs_nvcc: bool = False
    package: str = ""
    without: str = ""


OPS = {
    "cpu_adam": Op(
        "CPUAdamBuilder",
        "DeepSpeedCPUAdam, for an offloaded optimizer",
        without='config={"zero_force_ds_cpu_optimizer": False} (torch\'s optimizer on the CPU)',
    ),
    "fused_adam": Op(
        "FusedAdamBuilder",
        "FusedAdam, for Adam in an engine's config on a GPU",
        needs_nvcc=True,
        without='config={"optimizer": {"params": {"torch_adam": True}}} (torch\'s Adam)',
    ),
    "async_io": Op(
        "AsyncIOBuilder",
        "offload to NVMe",
        header="libaio.h",
        package="libaio-dev",
        without="offload to 'cpu'",
    ),
}


def build(name: str, device_type: str) -> None:
    """Build an op unless it is built; print a line of progress a second.

    Raises:
        ConfigurationError: a compiler or a library is missing (with the command that installs it),
            or the build failed (with its last lines).
    """
    folder = _folder(device_type) / name
    mark = folder / f".stratagem-{_environment()}"
    if mark.exists() and (folder / f"{name}.so").exists():
        with _one_builder(folder):
            _remove_old_lock(folder)  # loading it would wait for that, too
        return
    missing = what_is_missing(name)
    if missing:
        raise ConfigurationError(f"DeepSpeed's op {name!r} cannot be built here: {missing}")
    folder.mkdir(parents=True, exist_ok=True)
    with _one_builder(folder):
        _remove_old_lock(folder)
        if mark.exists() and (folder / f"{name}.so").exists():
            return  # by another process, meanwhile
        _run_build(name, device_type)
        mark.touch()


def is_built(name: str, device_type: str) -> bool:
    """Return whether an op was built for the versions that are installed."""
    folder = _folder(device_type) / name
    return (folder / f".stratagem-{_environment()}").exists()


def what_is_missing(name: str) -> str:
    """Return what is missing to build an op, and the command that installs it; "": nothing."""
    op = OPS[name]
    problems = []
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        problems.append(
            f"there is no C++ compiler ({compiler!r} was not found): apt-get install g++"
        )
    elif op.header and not _compiles(compiler, f"#include <{op.header}>\nint main() {{}}\n"):
        problems.append(f"{op.header} is missing: apt-get install {op.package}")
    if op.needs_nvcc and not _nvcc():
        problems.append(
            "CUDA's compiler nvcc is missing: install CUDA's toolkit of torch's version of CUDA, "
            "and set CUDA_HOME to its folder"
        )
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        problems.append("ninja is missing: pip install ninja")
    if problems and op.without:
        problems.append(f"or do without it, by {op.without}")
    return "; ".join(problems)


def _nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc", path=None if CUDA_HOME is None else f"{CUDA_HOME}/bin")


def check_nvme_path(path: str) -> None:
    """Refuse a folder for NVMe offload that cannot be written.

    Raises:
        ConfigurationError: it is missing, or not writable.
    """
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written ({error.strerror}): pass a folder on the "
            "NVMe device that you may write to"
        ) from error


def _folder(device_type: str) -> Path:
    """Return the folder that torch builds extensions in."""
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    if asked:
        return Path(asked)
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    version = torch.version.cuda
    device = "cpu" if version is None else f"cu{version.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{device}"


def _environment() -> str:
    """Return what a build depends on: versions and paths, which ninja compares too."""
    import torch

    places = (importlib.util.find_spec(name) for name in ("deepspeed", "torch"))
    origins = " ".join(str(place.origin) for place in places if place is not None)
    where = zlib.crc32(origins.encode())
    return f"deepspeed-{installed_version()}-torch-{torch.__version__}-{where:08x}"


def _compiles(compiler: str, code: str) -> bool:
    done = subprocess.run(
        [compiler, "-x", "c++", "-fsyntax-only", "-"],
        input=code,
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
        )
    _say(f"built {name!r} in {time.monotonic() - began:.0f} s")


def _step(line: str) -> str:
    """Return ninja's "[2/5]" in a line of its output."""
    found = re.match(r"\[(\d+/\d+)\]", line)
    return f" (step {found[1]})" if found else ""


def _say(what: str) -> None:
    print(f"stratagem: {what}", file=sys.stderr, flush=True)
