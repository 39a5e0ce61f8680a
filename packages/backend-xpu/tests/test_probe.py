"""Which Intel GPUs there are, and why none: from stated facts, and from a played sysfs."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from stratagem.discovery import Availability, TorchBuild
from stratagem_xpu import probe
from stratagem_xpu.probe import Card, availability, cards

XPU = TorchBuild("2.13.0+xpu", None, xpu="20250301")
CPU = TorchBuild("2.13.0+cpu", None)
ARC = Card("0000:03:00.0", "xe")
MAX = tuple(Card(f"0000:{bus}:00.0", "i915", tiles=2) for bus in ("18", "4d"))
INTEGRATED = Card("0000:00:02.0", "i915")


def found(
    *gpus: Card, build: TorchBuild | None = XPU, level_zero: bool = True, **environ: str
) -> Availability:
    return availability(environ, build, lambda: list(gpus), lambda: level_zero)


def test_each_tile_is_a_device() -> None:
    assert found(*MAX) == Availability(4, "4 device(s) on 2 Intel GPU(s)")
    assert found(*MAX, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE").count == 2
    assert found(ARC).count == 1


@pytest.mark.parametrize(("mask", "count"), [("0", 1), ("1,3", 2), ("0.0,0.1", 1)])
def test_the_affinity_mask_chooses_devices(mask: str, count: int) -> None:
    seen = found(*MAX, ZE_AFFINITY_MASK=mask)
    assert seen.count == count
    assert seen.reason.endswith(f"by ZE_AFFINITY_MASK={mask!r}")


def test_a_mask_that_names_no_device_is_refused() -> None:
    assert found(*MAX, ZE_AFFINITY_MASK="9") == Availability(
        0,
        "ZE_AFFINITY_MASK='9' names no device that is here: they are numbered from 0 to 3. "
        "Unset it, or name some of them",
    )


def test_an_empty_mask_chooses_nothing() -> None:
    assert found(*MAX, ZE_AFFINITY_MASK="") == found(*MAX)


def test_the_mask_is_applied_before_the_processors_own_gpu_is_left_out() -> None:
    assert found(INTEGRATED, ARC, ZE_AFFINITY_MASK="0").count == 1
    assert found(INTEGRATED, ARC, ZE_AFFINITY_MASK="1").count == 1
    assert found(INTEGRATED, ARC, ZE_AFFINITY_MASK="0,1").count == 1
    closed = Card(INTEGRATED.address, "i915", problem="cannot be opened")
    assert found(closed, ARC, ZE_AFFINITY_MASK="1").problems == ((0, closed.problem),)
    assert found(closed, ARC, ZE_AFFINITY_MASK="0,1").problems == ()


def test_integrated_gpu_counts_only_if_alone() -> None:
    assert found(INTEGRATED).count == 1
    assert found(INTEGRATED, ARC) == Availability(1, "1 device(s) on 1 Intel GPU(s)")


def test_unavailable_gpu_reasons_name_a_remedy() -> None:
    assert found(ARC, build=None).reason == "torch is not installed"
    assert found().reason.startswith("there is no Intel GPU with a driver (i915 or xe")
    wheel = "pip install torch --index-url https://download.pytorch.org/whl/xpu"
    assert found(ARC, build=CPU) == Availability(
        0,
        "torch 2.13.0+cpu was built without XPU, and there is an Intel GPU: "
        f"{wheel} installs the build for Intel GPUs",
    )
    driver = found(ARC, level_zero=False)
    assert driver.count == 0
    assert "install the packages libze1 and libze-intel-gpu1" in driver.reason


def test_intel_gpu_without_permission_is_reported() -> None:
    closed = Card(ARC.address, "xe", problem="cannot be opened by this user")
    assert found(closed, Card("0000:04:00.0", "xe")).problems == ((0, closed.problem),)


def test_on_windows_one_device_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert found().count == 1
    assert found(ZE_AFFINITY_MASK="1").count == 1
    missing = "there is no Intel GPU with a driver (Level Zero, of Intel's graphics driver)"
    assert found(level_zero=False) == Availability(0, missing)


# -- sysfs, played


def machine(
    folder: Path, name: str, *, vendor: str = "0x8086", device: str = "0x56a0", driver: str = "xe"
) -> Path:
    """Make a graphics card in a folder like /sys/class/drm, and its node; return the card."""
    pci = folder / "pci" / f"0000:{name[4:].zfill(2)}:00.0"
    (pci / "drm" / f"renderD{128 + int(name[4:])}").mkdir(parents=True)
    (pci / "vendor").write_text(f"{vendor}\n")
    (pci / "device").write_text(f"{device}\n")
    (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (pci / "driver").symlink_to(folder / "drivers" / driver)
    card = folder / "drm" / name
    card.mkdir(parents=True)
    (card / "device").symlink_to(pci)
    nodes = folder / "dri"
    nodes.mkdir(exist_ok=True)
    (nodes / f"renderD{128 + int(name[4:])}").touch()
    return card


def seen(folder: Path) -> list[Card]:
    return list(cards(folder / "drm", folder / "dri"))


def test_cards_of_intels_drivers_are_found(tmp_path: Path) -> None:
    machine(tmp_path, "card1")
    machine(tmp_path, "card10", driver="i915")
    machine(tmp_path, "card2", vendor="0x10de", driver="nvidia")
    machine(tmp_path, "card3", driver="vfio-pci")
    (tmp_path / "drm/card1-HDMI-A-1").mkdir()
    assert seen(tmp_path) == [Card("0000:01:00.0", "xe"), Card("0000:10:00.0", "i915")]


def test_tiles_are_counted_as_each_driver_lists_them(tmp_path: Path) -> None:
    xe = machine(tmp_path, "card1")
    for tile in ("tile0", "tile1"):
        (xe / "device" / tile).mkdir()
    data_center = machine(tmp_path, "card2", device="0x0bd5", driver="i915")
    laptop = machine(tmp_path, "card3", device="0x7d55", driver="i915")  # its gt1 is for media
    for card in (data_center, laptop):
        for gt in ("gt0", "gt1"):
            (card / "gt" / gt).mkdir(parents=True)
    assert [card.tiles for card in seen(tmp_path)] == [2, 2, 1]


def test_a_card_without_a_node_cannot_be_used(tmp_path: Path) -> None:
    machine(tmp_path, "card1")
    (tmp_path / "dri/renderD129").unlink()
    assert "has no render node" in seen(tmp_path)[0].problem


def test_a_node_of_another_group_names_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, "card1")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert seen(tmp_path)[0].problem.endswith("join the group 'render'")


def test_probe_without_sysfs_finds_no_card(tmp_path: Path) -> None:
    assert seen(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_level_zero_is_looked_for(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        assert name == "libze_loader.so.1"
        if not there:
            raise OSError(name)
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert probe.has_level_zero() is there
