"""Whether there is a GPU, and why not: from stated facts, and from macOS played by stubs."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from types import SimpleNamespace

import pytest

from stratagem.discovery import Availability, TorchBuild
from stratagem_mps import probe
from stratagem_mps.probe import Mac, availability, has_bfloat16

M2 = Mac("darwin", "arm64", (14, 5), 2**34)
BUILD = TorchBuild("2.13.0", None)


def found(mac: Mac = M2, build: TorchBuild | None = BUILD, metal: bool = True) -> Availability:
    return availability(mac, lambda: build, lambda: metal)


def test_a_mac_has_one_device_with_the_machines_memory() -> None:
    assert found() == Availability(1, "Apple silicon's GPU, macOS 14.5", memory=2**34)


def test_metal_unavailable_reasons_name_the_cause() -> None:
    assert found(Mac("linux")).reason == "Metal needs macOS, and this is linux"
    intel = found(Mac("darwin", "x86_64", (14, 5)))
    assert intel.count == 0
    assert "this Python was built for x86_64" in intel.reason
    assert "install an arm64 build of Python" in intel.reason
    assert found(build=None).reason == "torch is not installed"
    without = found(metal=False)
    assert without.count == 0
    assert without.reason.startswith("Metal finds no device: a virtual machine")


@pytest.mark.parametrize(("macos", "has"), [((13, 6), False), ((14, 0), True), ((26, 1), True)])
def test_bfloat16_comes_with_macos_14(macos: tuple[int, int], has: bool) -> None:
    assert has_bfloat16(macos) is has


@pytest.mark.parametrize(
    ("text", "numbers"), [("14.5.1", (14, 5)), ("15", (15, 0)), ("", (0, 0)), ("26.1", (26, 1))]
)
def test_the_version_of_macos_is_read(
    text: str, numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (text, ("", "", ""), "arm64"))
    assert probe.macos_version() == numbers


def test_a_mac_is_described_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="arm64"))
    sizes = {"SC_PAGE_SIZE": 2**14, "SC_PHYS_PAGES": 2**20}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert probe.this_mac() == Mac("darwin", "arm64", (15, 1), 2**34)


def test_of_another_system_only_the_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "uname")
    assert probe.mps_availability() == Availability(0, "Metal needs macOS, and this is win32")


@pytest.mark.parametrize("device", [None, 4096])
def test_has_metal_calls_the_function_that_torch_calls(
    device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    class Create:
        """`MTLCreateSystemDefaultDevice`: it returns an address, which fits no int of C."""

        restype: object = ctypes.c_int

        def __call__(self) -> int | None:
            assert self.restype is ctypes.c_void_p
            return device

    def load(path: str) -> object:
        loaded.append(path.rpartition("/")[2])
        return SimpleNamespace(MTLCreateSystemDefaultDevice=Create())

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert probe.has_metal() is bool(device)
    assert loaded == ["CoreGraphics", "Metal"]


def test_has_metal_is_false_without_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> object:
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not probe.has_metal()
