"""Builds the simulated device, once for each version of torch and of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")
HEADER = Path(__file__).with_name("streams.h")


def compiler() -> str | None:
    """Return the C++ compiler to build with; None: there is none here."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Return the library, built now (15 s) unless it was before."""
    source = SOURCE.read_bytes() + HEADER.read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stratagem-tests"
    library = folder / f"simulated_{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: several processes may build at once.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            subprocess.run(_command(made), check=True, capture_output=True, text=True)
            made.replace(library)
    return library


def _command(target: Path) -> list[str]:
    found = compiler()
    assert found is not None, "no C++ compiler"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [argument for path in include_paths() for argument in ("-isystem", path)]
    libraries = [argument for path in library_paths() for argument in ("-L", path)]
    return [
        *(found, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", abi),
        *(*includes, str(SOURCE), "-o", str(target)),
        *(*libraries, "-lc10", "-ltorch_cpu", "-ltorch"),
    ]
