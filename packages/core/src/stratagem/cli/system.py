"""What `stratagem doctor` says of the machine: versions, cores, memory and GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata

from stratagem.launch.environment import available_cores

_GPU_TIMEOUT = 10.0
"""Seconds for nvidia-smi, which takes long where a driver hangs."""


@dataclass(frozen=True)
class System:
    """This machine, as this process sees it.

    Attributes:
        platform: the operating system and its version.
        cores: how many this process may use.
        all_cores: how many there are.
        memory: bytes that this process may use: those of the machine or, where that is less, of
            its control group (a container's or a job's limit); None if unknown.
        gpus: a line for each NVIDIA GPU.
        gpu_problem: why the GPUs could not be listed; empty if they could, or if there are none.
    """

    platform: str
    cores: int
    all_cores: int
    memory: int | None
    gpus: tuple[str, ...]
    gpu_problem: str


def this_system() -> System:
    """Look at this machine."""
    gpus, gpu_problem = _nvidia_gpus()
    return System(
        platform=platform.platform(),
        cores=available_cores(),
        all_cores=os.cpu_count() or 1,
        memory=_memory(),
        gpus=gpus,
        gpu_problem=gpu_problem,
    )


def version_of(distribution: str) -> str | None:
    """Return an installed distribution's version from its metadata, or None; imports nothing."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def _memory() -> int | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        # "max" where there is no limit, which int() refuses.
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (ValueError, OSError):
        return total


def _nvidia_gpus() -> tuple[tuple[str, ...], str]:
    """Return a line for each GPU, and why they could not be listed."""
    fields = "--query-gpu=index,name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", fields, "--format=csv,noheader"],  # noqa: S607 - wherever the driver put it
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_GPU_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        return _gpus_of_driver(), ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return _gpus_of_driver(), f"nvidia-smi: {error}"
    if done.returncode != 0:
        # It prints its errors to either stream.
        said = " ".join((done.stderr or done.stdout).split())
        return _gpus_of_driver(), f"nvidia-smi ended with exit code {done.returncode}: {said}"
    return tuple(_described(line) for line in done.stdout.splitlines() if line.strip()), ""


def _described(line: str) -> str:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4:
        return line.strip()
    index, name, memory, driver = parts
    return f"{index}: {name}, {memory}, driver {driver}"


def _gpus_of_driver() -> tuple[str, ...]:
    """Return what the driver itself says, for containers that lack nvidia-smi."""
    gpus = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        gpus.append(f"{file.parent.name}: {models[0] if models else 'unknown model'}")
    return tuple(gpus)
