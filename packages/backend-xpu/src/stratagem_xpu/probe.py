"""Which Intel GPUs this process can use, or why none: by sysfs, without torch or Level Zero.

Level Zero presents each tile of a GPU as a device, unless ZE_FLAT_DEVICE_HIERARCHY says COMPOSITE,
and ZE_AFFINITY_MASK chooses devices ("Flattening GPU Tile Hierarchy" in Intel's documentation).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stratagem.discovery import Availability, TorchBuild, read_text, torch_build

if TYPE_CHECKING:
    from pathlib import Path  # slow to import

CARDS, NODES = "/sys/class/drm", "/dev/dri"
WHEEL = (
    "pip install torch --index-url https://download.pytorch.org/whl/xpu installs the build for "
    "Intel GPUs"
)
_INTEL = "0x8086"
_MAX_SERIES = "0x0bd"
"""How the device ids of the Data Center GPU Max begin; under i915, its tiles are its GTs."""


@dataclass(frozen=True)
class Card:
    """An Intel GPU with a kernel driver.

    Attributes:
        address: on the PCI bus, such as "0000:4d:00.0".
        driver: the kernel's driver, "i915" or "xe".
        tiles: the number of its tiles.
        problem: why this process cannot use it; "" if it can.
    """

    address: str
    driver: str
    tiles: int = 1
    problem: str = ""

    @property
    def is_integrated(self) -> bool:
        """Whether the GPU is a part of the processor, which is always at the same address."""
        return self.address.endswith(":00:02.0")


def xpu_availability() -> Availability:
    """Return the Intel GPUs that this process can use, or the reason why not."""
    return availability(os.environ, torch_build(), _find, has_level_zero)


def _find() -> list[Card]:
    if not os.path.isdir(CARDS):  # noqa: PTH112 - pathlib is slow to import
        return []
    from pathlib import Path

    return list(cards(Path(CARDS), Path(NODES)))


def availability(
    environ: Mapping[str, str],
    build: TorchBuild | None,
    find: Callable[[], list[Card]],
    level_zero: Callable[[], bool],
) -> Availability:
    """Return the devices that these facts describe.

    The GPU of the processor counts only without other GPUs, as in torch.

    Args:
        environ: environment variables.
        build: the installed build of torch; None: torch is not installed.
        find: returns the GPUs.
        level_zero: returns whether the loader of Intel's user-space driver is installed.

    Example:
        >>> from stratagem.discovery import TorchBuild
        >>> from stratagem_xpu.probe import Card, availability
        >>> build = TorchBuild("2.13.0+xpu", None, xpu="20250301")
        >>> two_tiles = Card("0000:4d:00.0", "i915", tiles=2)
        >>> availability({}, build, lambda: [two_tiles], lambda: True).reason
        '2 device(s) on 1 Intel GPU(s)'
    """
    if build is None:
        return Availability(0, "torch is not installed")
    if sys.platform == "win32":
        found = [Card("", "Windows's")] if level_zero() else []
    else:
        found = find()
    if not found:
        driver = "i915 or xe in the kernel, Level Zero on top"
        if sys.platform == "win32":
            driver = "Level Zero, of Intel's graphics driver"
        return Availability(0, f"there is no Intel GPU with a driver ({driver})")
    if build.xpu is None:
        return Availability(
            0, f"torch {build.version} was built without XPU, and there is an Intel GPU: {WHEEL}"
        )
    if not level_zero():
        return Availability(
            0,
            "Intel's driver is incomplete: its library ze_loader (Level Zero) was not found: "
            "install the packages libze1 and libze-intel-gpu1",
        )
    # Level Zero lists the processor's own GPU last, and the mask counts it too.
    found.sort(key=lambda card: card.is_integrated)
    each = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() != "COMPOSITE"
    devices = [card for card in found for _ in range(card.tiles if each else 1)]
    mask, said = environ.get("ZE_AFFINITY_MASK"), ""
    # Level Zero ignores an empty one. On Windows, the number of devices is not known.
    if mask and sys.platform != "win32":
        # "1" and "1.0" both name a part of the device 1; a device is counted once.
        chosen = dict.fromkeys(int(each) for each in re.findall(r"(?:^|,)\s*(\d+)", mask))
        last = len(devices) - 1
        devices = [devices[index] for index in chosen if index <= last]
        said = f" by ZE_AFFINITY_MASK={mask!r}"
        if not devices:
            return Availability(
                0,
                f"ZE_AFFINITY_MASK={mask!r} names no device that is here: they are numbered from 0 "
                f"to {last}. Unset it, or name some of them",
            )
    devices = [card for card in devices if not card.is_integrated] or devices
    count = len({card.address for card in devices})
    problems = tuple((index, card.problem) for index, card in enumerate(devices) if card.problem)
    reason = f"{len(devices)} device(s) on {count} Intel GPU(s){said}"
    return Availability(len(devices), reason, problems=problems)


def cards(folder: Path, nodes: Path) -> Iterator[Card]:
    """Yield the Intel GPUs that have a driver.

    Args:
        folder: the kernel's list of graphics cards, /sys/class/drm.
        nodes: the folder of device nodes, /dev/dri; a container contains only its assigned devices.
    """
    for card in sorted(folder.glob("card*"), key=lambda each: (len(each.name), each.name)):
        device = card / "device"
        driver = (device / "driver").resolve().name
        vendor = read_text(str(device / "vendor")).strip()
        if not card.name[4:].isdecimal() or vendor != _INTEL or driver not in ("i915", "xe"):
            continue  # a connector of a card, another vendor's, or handed to a virtual machine
        node = next(iter(sorted(device.glob("drm/renderD*"))), None)
        place = None if node is None else nodes / node.name
        if place is None or not place.exists():
            problem = f"has no render node in {nodes}, so that it can only show pictures"
        elif not os.access(place, os.R_OK | os.W_OK):
            problem = f"cannot be opened by this user ({place}): join the group 'render'"
        else:
            problem = ""
        tiles = len(list(device.glob("tile*")))
        if driver == "i915" and read_text(str(device / "device")).startswith(_MAX_SERIES):
            tiles = len(list(card.glob("gt/gt*")))
        yield Card(device.resolve().name, driver, tiles or 1, problem)


def has_level_zero() -> bool:
    """Return whether the loader of Intel's user-space driver is installed."""
    import ctypes

    try:
        ctypes.CDLL("ze_loader.dll" if sys.platform == "win32" else "libze_loader.so.1")
    except OSError:
        return False
    return True
