"""What `stratagem doctor` says of the machine: cores, memory and GPUs."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from stratagem.launch.cores import available_cores

_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class System:
    """This machine, as this process sees it.

    Attributes:
        platform: the operating system and its version.
        cores: how many this process may use.
        all_cores: how many there are.
        memory: bytes that this process may use: those of the machine or, where that is less, of
            its control group (a container's or a job's limit); None if unknown.
        gpus: a line for each NVIDIA GPU that the kernel's driver lists, whether or not a
            distribution is installed that trains on it.
    """

    platform: str
    cores: int
    all_cores: int
    memory: int | None
    gpus: tuple[str, ...]


def this_system() -> System:
    """Look at this machine."""
    return System(
        platform=_platform(),
        cores=available_cores(),
        all_cores=os.cpu_count() or 1,
        memory=_memory(),
        gpus=nvidia_gpus(_NVIDIA),
    )


def _platform() -> str:
    """Return what `platform.platform()` does, which starts a program for a name it leaves out."""
    if sys.platform != "linux":
        return platform.platform()
    host = os.uname()
    libc = "".join(platform.libc_ver())
    return f"{host.sysname}-{host.release}-{host.machine}" + (f"-with-{libc}" if libc else "")


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


def nvidia_gpus(driver: Path) -> tuple[str, ...]:
    """Return a line for each GPU, from the files of the driver; nvidia-smi takes up to seconds.

    Args:
        driver: its folder, /proc/driver/nvidia.
    """
    numbers = re.search(r"\d+\.\d+(\.\d+)?", _text(driver / "version"))
    version = f", driver {numbers[0]}" if numbers else ""
    gpus = []
    for file in sorted(driver.glob("gpus/*/information")):
        model = re.search(r"^Model:\s*(.+?)\s*$", _text(file), re.MULTILINE)
        gpus.append(f"{file.parent.name}: {model[1] if model else 'unknown model'}{version}")
    return tuple(gpus)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
