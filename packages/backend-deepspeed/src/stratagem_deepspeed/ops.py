"""DeepSpeed's compiled ops: what they are for, whether they are built, what building them needs.

Found without torch, DeepSpeed, a compiler, pathlib or shutil, so that `stratagem doctor` says it at
once. `op_builds.py` builds them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from stratagem.discovery import torch_build
from stratagem_deepspeed.library import installed_version

_INCLUDED = ("/usr/local/include", "/usr/include", f"{sys.prefix}/include")
"""Where a header of a library is, mostly; the last is conda's."""


@dataclass(frozen=True)
class Op:
    """An op that strategies here may need.

    Attributes:
        builder: the class of DeepSpeed.
        purpose: its purpose, in a few words.
        header: a C header that must exist, besides a compiler; "" for no header.
        needs_nvcc: whether it has kernels for GPUs, which need CUDA's compiler.
        package: the Debian package of the header.
        without: how to avoid the op.
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


def is_built(name: str) -> bool:
    """Return whether an op was built for the versions that are installed."""
    return os.path.exists(mark_of(name))  # noqa: PTH110 - pathlib is slow to import


def is_seen(header: str) -> bool:
    """Return whether a C header lies where compilers look by default, or are told to."""
    told = (os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH"))
    folders = [*filter(None, os.pathsep.join(told).split(os.pathsep)), *_INCLUDED]
    return any(os.path.isfile(f"{folder}/{header}") for folder in folders)  # noqa: PTH113


def what_is_missing(name: str, *, has_header: Callable[[str], bool] = is_seen) -> str:
    """Return the missing parts for building an op and the command to install them, or "".

    Args:
        name: the name of the op.
        has_header: returns whether a C header exists. The default searches the usual folders; a
            query of the compiler is always right, and takes 50 ms.
    """
    op = OPS[name]
    problems = []
    if not _is_command(compiler()):
        problems.append(
            f"there is no C++ compiler ({compiler()!r} was not found): apt-get install g++"
        )
    elif op.header and not has_header(op.header):
        problems.append(f"{op.header} is missing: apt-get install {op.package}")
    if op.needs_nvcc and not _has_nvcc():
        problems.append(
            "CUDA's compiler nvcc is missing: install CUDA's toolkit of torch's version of CUDA, "
            "and set CUDA_HOME to its folder"
        )
    if importlib.util.find_spec("ninja") is None and not _is_command("ninja"):
        problems.append("ninja is missing: pip install ninja")
    if problems and op.without:
        problems.append(f"or do without it, by {op.without}")
    return "; ".join(problems)


def compiler() -> str:
    """Return the C++ compiler's command, as torch takes it."""
    return os.environ.get("CXX", "g++")


def _is_command(name: str) -> bool:
    """Whether a command is there, by its name or path."""
    folders = [""] if "/" in name else [f"{folder}/" for folder in os.get_exec_path()]
    return any(os.access(f"{folder}{name}", os.X_OK) for folder in folders)


def _has_nvcc() -> bool:
    """Whether CUDA's compiler is where torch's cpp_extension looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return _is_command(f"{home}/bin/nvcc")
    return _is_command("nvcc") or _is_command("/usr/local/cuda/bin/nvcc")


def folder_of(name: str) -> str:
    """Return the folder that torch builds an op in; a test compares it with torch's own."""
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    if asked:
        return f"{asked}/{name}"
    torch = torch_build()
    version = None if torch is None else torch.cuda
    device = "cpu" if version is None else f"cu{version.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))  # noqa: PTH111
    return f"{os.path.realpath(f'{cache}/torch_extensions')}/{python}_{device}/{name}"


def mark_of(name: str) -> str:
    """Return the file that says that an op was built for the versions and paths that are here."""
    places = (importlib.util.find_spec(name) for name in ("deepspeed", "torch"))
    # Paths too, which ninja compares.
    origins = " ".join(str(place.origin) for place in places if place is not None)
    where = zlib.crc32(origins.encode())
    torch = torch_build()
    version = "none" if torch is None else torch.version
    mark = f".stratagem-deepspeed-{installed_version()}-torch-{version}-{where:08x}"
    return f"{folder_of(name)}/{mark}"
