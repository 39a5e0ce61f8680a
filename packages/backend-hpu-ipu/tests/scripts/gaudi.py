"""Lets the probe find two Gaudi devices; imported by the scripts of this folder."""

from __future__ import annotations

from pathlib import Path

from stratagem_hpu_ipu import hpu_probe


def two_devices(folder: Path) -> None:
    """Make what a machine with two Gaudi devices has, under `folder`."""
    for name in ("accel0", "accel1"):
        driver = folder / "drivers" / "habanalabs"
        driver.mkdir(parents=True, exist_ok=True)
        entry = folder / "sys" / name / "device"
        entry.mkdir(parents=True, exist_ok=True)
        if not (entry / "driver").is_symlink():
            (entry / "driver").symlink_to(driver)
        node = folder / "dev" / "accel" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
    hpu_probe.ACCELERATORS, hpu_probe.DEVICES = folder / "sys", folder / "dev"
