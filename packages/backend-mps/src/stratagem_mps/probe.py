"""Whether this process can use Apple silicon's GPU, or why not: by macOS, without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from stratagem.discovery import Availability, TorchBuild, torch_build

_FRAMEWORKS = "/System/Library/Frameworks"


@dataclass(frozen=True)
class Mac:
    """This machine.

    Attributes:
        system: as `sys.platform`; "darwin" is macOS.
        machine: the processor for which Python was built; "arm64" is Apple silicon.
        macos: the version of macOS, (major, minor).
        memory: the machine's memory in bytes, which its GPU shares; None: unknown.
    """

    system: str
    machine: str = ""
    macos: tuple[int, int] = (0, 0)
    memory: int | None = None


def mps_availability() -> Availability:
    """Return the GPU if this process can use it, and otherwise why not."""
    return availability(this_mac(), torch_build, has_metal)


def availability(
    mac: Mac, build: Callable[[], TorchBuild | None], metal: Callable[[], bool]
) -> Availability:
    """Return the GPU that these facts describe.

    Args:
        mac: the machine.
        build: returns the installed build of torch; None: torch is not installed.
        metal: returns whether Metal finds a device.

    Example:
        >>> from stratagem.discovery import TorchBuild
        >>> from stratagem_mps.probe import Mac, availability
        >>> mac = Mac("darwin", "arm64", (15, 1), 16 * 2**30)
        >>> availability(mac, lambda: TorchBuild("2.13.0", None), lambda: True).reason
        "Apple silicon's GPU, macOS 15.1"
    """
    if mac.system != "darwin":
        return Availability(0, f"Metal needs macOS, and this is {mac.system}")
    if mac.machine != "arm64":
        return Availability(
            0,
            f"this Python was built for {mac.machine}, and torch's builds for macOS are for arm64 "
            "(Apple silicon): on such a Mac, install an arm64 build of Python; on an Intel Mac, "
            "use accelerator='cpu'",
        )
    if build() is None:
        return Availability(0, "torch is not installed")
    if not metal():
        return Availability(
            0,
            "Metal finds no device: a virtual machine or a session without graphics has none; run "
            "on the Mac itself, or use accelerator='cpu'",
        )
    version = ".".join(map(str, mac.macos))
    return Availability(1, f"Apple silicon's GPU, macOS {version}", memory=mac.memory)


def has_bfloat16(macos: tuple[int, int]) -> bool:
    """Return whether Metal has bfloat16 in a version of macOS (torch's rule for MPS)."""
    return macos >= (14, 0)


def this_mac() -> Mac:
    """Return this machine; of other systems than macOS, only the name."""
    if sys.platform != "darwin":
        return Mac(sys.platform)
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = None
    return Mac(sys.platform, os.uname().machine, macos_version(), memory)


def macos_version() -> tuple[int, int]:
    """Return the version of macOS, (major, minor); (0, 0) on other systems."""
    import platform  # slow to import

    numbers = [int(part) for part in platform.mac_ver()[0].split(".") if part.isdecimal()]
    major, minor = (*numbers, 0, 0)[:2]
    return major, minor


def has_metal() -> bool:
    """Return whether Metal finds a device, asked as torch asks it."""
    import ctypes

    try:
        # A program without CoreGraphics gets no device.
        ctypes.CDLL(f"{_FRAMEWORKS}/CoreGraphics.framework/CoreGraphics")
        metal = ctypes.CDLL(f"{_FRAMEWORKS}/Metal.framework/Metal")
        create = metal.MTLCreateSystemDefaultDevice
    except (OSError, AttributeError):
        return False
    create.restype = ctypes.c_void_p
    return bool(create())
