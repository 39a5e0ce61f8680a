"""Which Gaudi devices this process can use, or why none: without torch and without the SDK.

The kernel driver `habanalabs` makes /dev/accel/accelN and lists it in /sys/class/accel, among those
of other vendors; before Linux 6.2 it made /dev/hlN. Which of them processes may take is narrowed by
HABANA_VISIBLE_MODULES ("Multiple Workloads on a Single Docker" in Intel's documentation).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stratagem.discovery import Availability

if TYPE_CHECKING:
    from pathlib import Path  # slow to import, and mostly for nothing

DEVICES = "/dev"
ACCELERATORS = "/sys/class/accel"
VISIBLE = "HABANA_VISIBLE_MODULES"


def hpu_availability() -> Availability:
    """Return the Gaudi devices that this process can use, or the reason for having no device."""
    if not has_sdk():
        return availability(os.environ, sdk=False, devices=0)
    from pathlib import Path

    devices = count_devices(Path(ACCELERATORS), Path(DEVICES))
    return availability(os.environ, sdk=True, devices=devices)


def availability(environ: Mapping[str, str], *, sdk: bool, devices: int) -> Availability:
    """Return the availability that follows from these facts.

    Args:
        environ: environment variables.
        sdk: whether the SDK's Python package is installed.
        devices: how many the kernel's driver has made.

    Example:
        >>> from stratagem_hpu_ipu.hpu_probe import availability
        >>> availability({"HABANA_VISIBLE_MODULES": "4,5"}, sdk=True, devices=8).reason
        '2 of 8 Gaudi devices by HABANA_VISIBLE_MODULES'
        >>> availability({}, sdk=True, devices=0).count
        0
    """
    if not sdk:
        return Availability(
            0,
            "the Gaudi SDK is not installed (no package habana_frameworks.torch; it comes with its "
            "build of torch, see https://docs.habana.ai)",
        )
    if not devices:
        return Availability(
            0,
            "there is no Gaudi device: the driver habanalabs has made none under /dev/accel, and "
            "there is no /dev/hl0",
        )
    visible = environ.get(VISIBLE)
    if visible is None:
        return Availability(devices, f"{devices} Gaudi device(s)")
    chosen = {part.strip() for part in visible.split(",")} - {""}
    if not chosen:
        return Availability(0, f"{VISIBLE}={visible!r} names no Gaudi device")
    count = min(len(chosen), devices)
    return Availability(count, f"{count} of {devices} Gaudi devices by {VISIBLE}")


def has_sdk() -> bool:
    """Return whether the SDK's package for torch is installed, without importing it."""
    found = importlib.util.find_spec("habana_frameworks")
    folders = [] if found is None else found.submodule_search_locations or []
    return any(os.path.isdir(f"{folder}/torch") for folder in folders)  # noqa: PTH112


def count_devices(accelerators: Path, devices: Path) -> int:
    """Return the number of Gaudi's device nodes.

    Args:
        accelerators: the kernel's list of accelerators, /sys/class/accel.
        devices: the folder of device nodes; a container contains only its assigned devices.
    """
    listed = accelerators.iterdir() if accelerators.is_dir() else ()
    # Other vendors' accelerators are in the same list.
    ours = [
        entry.name
        for entry in listed
        if (entry / "device" / "driver").resolve().name == "habanalabs"
    ]
    nodes = sum((devices / "accel" / name).exists() for name in ours)
    older = sum(bool(re.fullmatch(r"hl\d+", node.name)) for node in devices.glob("hl*"))
    return nodes or older
