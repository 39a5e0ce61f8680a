"""What `stratagem doctor` says of the machine: cores, memory and GPUs."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from stratagem.discovery.entry_points import read_text
from stratagem.launch.cores import available_cores

_NVIDIA = "/proc/driver/nvidia"


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
        import platform

        return platform.platform()
    host = os.uname()
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    return f"{host.sysname}-{host.release}-{host.machine}" + (f"-with-{libc}" if libc else "")


def _memory() -> int | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        # "max" where there is no limit, which int() refuses.
        return min(total, int(read_text("/sys/fs/cgroup/memory.max")))
    except ValueError:
        return total


def nvidia_gpus(driver: str) -> tuple[str, ...]:
    """Return a line for each GPU, from the files of the driver; nvidia-smi takes up to seconds.

    Args:
        driver: its folder, /proc/driver/nvidia.
    """
    numbers = re.search(r"\d+\.\d+(\.\d+)?", read_text(f"{driver}/version"))
    version = f", driver {numbers[0]}" if numbers else ""
    gpus = []
    try:
        found = sorted(os.listdir(f"{driver}/gpus"))  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return ()
    for gpu in found:
        information = read_text(f"{driver}/gpus/{gpu}/information")
        model = re.search(r"^Model:\s*(.+?)\s*$", information, re.MULTILINE)
        gpus.append(f"{gpu}: {model[1] if model else 'unknown model'}{version}")
    return tuple(gpus)
