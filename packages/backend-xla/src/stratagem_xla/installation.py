"""What is there of PyTorch/XLA, found without importing it: versions, devices, and why not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from stratagem.discovery import Availability, Check, read_text, version_of
from stratagem.errors import ConfigurationError

SUPPORTED = "2.9"
"""The version of torch_xla that this backend is made for. It is built for the torch of the same
number, without declaring it, and a wrong pair fails by an undefined symbol when it is imported."""

# As torch_xla._internal.tpu has them, to count chips as it does.
_PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
_CHIPS = {"0x0027": 2, "0x005e": 1, "0x0063": 1, "0x006f": 1, "0x0056": 1, "0x0062": 1, "0x0076": 1}
"""PCI devices, and how many XLA devices each is: a chip of v2 and v3 is two."""


def install_command() -> str:
    """Return the command that installs a pair of versions that works, for this machine."""
    extra = "[tpu]" if _tpu_devices() or os.environ.get("PJRT_DEVICE") == "TPU" else ""
    return f"pip install torch=={SUPPORTED}.0 'torch_xla{extra}=={SUPPORTED}.0' numpy"


def version_problem() -> str:
    """Return why torch_xla cannot be imported here and the remedy, or "".

    Reads the metadata of installed distributions and imports none of them.
    """
    advice = f"in an environment of its own: {install_command()}"
    if importlib.util.find_spec("torch_xla") is None:
        return f"torch_xla is not installed; {advice}"
    xla, torch = version_of("torch_xla") or "none", version_of("torch") or "none"
    if _minor(xla) != SUPPORTED:
        return f"this backend is made for torch_xla {SUPPORTED}, and {xla} is installed; {advice}"
    if _minor(torch) != SUPPORTED:
        return f"torch_xla {xla} needs torch {SUPPORTED}, and {torch} is installed; {advice}"
    if importlib.util.find_spec("numpy") is None:
        return "torch_xla needs numpy, which is not installed: pip install numpy"
    return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def runtime() -> str:
    """Return the device type that PJRT is configured for, such as "CPU", or ""."""
    return os.environ.get("PJRT_DEVICE", "").upper()


def availability() -> Availability:
    """Return XLA's devices, and why these; the probe of the accelerator `tpu`."""
    problem = version_problem()
    if problem:
        return Availability(0, problem)
    kind = runtime()
    if kind == "CPU":
        return _cpu_devices()
    count = _visible_tpu_devices()
    if kind == "TPU":
        if not count:
            return Availability(0, "PJRT_DEVICE=TPU, and no TPU is attached to this machine")
        if not _has_libtpu():
            return Availability(0, f"libtpu is not installed: {install_command()}")
        return Availability(count, f"{count} TPU devices, PJRT_DEVICE=TPU")
    if not kind:
        found = f"{count} TPU devices are here" if count else "no TPU is attached to this machine"
        return Availability(
            0,
            f"PJRT_DEVICE is not set ({found}): set PJRT_DEVICE=TPU on a machine with TPUs, or "
            "PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4 to try it on the processor",
        )
    return Availability(0, f"PJRT_DEVICE={kind!r}: expected 'TPU', or 'CPU' to try it")


def _cpu_devices() -> Availability:
    text = os.environ.get("CPU_NUM_DEVICES", "1")
    if not text.isdigit() or int(text) < 1:
        return Availability(0, f"CPU_NUM_DEVICES={text!r}: expected a number of at least 1")
    return Availability(int(text), f"{text} devices of PJRT's CPU client: the processor, not a TPU")


def _tpu_devices() -> list[int]:
    """Return of each TPU chip that PCI shows how many XLA devices it is."""
    found = []
    # Not by pathlib, which is slow to import.
    for name in sorted(os.listdir(_PCI)) if os.path.isdir(_PCI) else ():  # noqa: PTH112, PTH208
        folder = f"{_PCI}/{name}"
        vendor, device = (read_text(f"{folder}/{what}").strip() for what in ("vendor", "device"))
        if vendor == _GOOGLE and device in _CHIPS:
            found.append(_CHIPS[device])
    return found


def _visible_tpu_devices() -> int:
    """Return the number of XLA devices on the chips that this process may use."""
    chips = _tpu_devices()
    visible = os.environ.get("TPU_VISIBLE_CHIPS", os.environ.get("TPU_VISIBLE_DEVICES"))
    if visible is not None:
        asked = {int(part) for part in visible.split(",") if part.strip().isdigit()}
        chips = [devices for index, devices in enumerate(chips) if index in asked]
    return sum(chips)


def _has_libtpu() -> bool:
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def checks() -> Iterator[Check]:
    """Yield the lines of `stratagem doctor`."""
    xla = version_of("torch_xla")
    problem = version_problem()
    name = "torch_xla" if xla is None else f"torch_xla {xla}"
    if problem:
        # A missing torch_xla is only unusable; a mismatched pair needs a repair.
        yield Check(name, "warning" if xla is None else "error", problem)
        return
    yield Check(name, "ok", f"with torch {version_of('torch')}")
    found = availability()
    yield Check("XLA devices", "ok" if found.count else "warning", found.reason)


def check_devices(strategy: str, devices: int, *, all_of_them: bool) -> None:
    """Raise for numbers of devices that the runtime cannot give to a strategy.

    Args:
        strategy: its name.
        devices: how many were planned.
        all_of_them: whether it drives every device of the process.

    Raises:
        ConfigurationError: the numbers differ; the message has a remedy.
    """
    found = availability()
    if all_of_them and devices != found.count:
        how = "CPU_NUM_DEVICES" if runtime() == "CPU" else "TPU_VISIBLE_CHIPS"
        raise ConfigurationError(
            f"the strategy {strategy!r} drives all {found.count} XLA devices of this process at "
            f"once, received devices={devices}: pass devices='auto', or set {how} before"
        )
    if not all_of_them and runtime() == "CPU" and found.count > 1:
        raise ConfigurationError(
            f"the strategy {strategy!r} uses one device, and CPU_NUM_DEVICES={found.count}: "
            "several devices of PJRT's CPU client work under SPMD only (replicated ones abort in "
            "their first collective): set CPU_NUM_DEVICES=1, or pass strategy='xla'"
        )
