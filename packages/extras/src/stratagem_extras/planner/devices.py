"""Figures of devices, by the names that people use for them; and sizes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stratagem.discovery import nearest_of
from stratagem.errors import ConfigurationError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A kind of device, by its vendor's data sheet.

    Attributes:
        name: such as "A100-80GB".
        accelerator: the name of its accelerator.
        memory: memory in bytes.
        flops: dense floating-point operations per second in bfloat16 (float16 if unsupported); 0:
            unknown.
        link: bytes per second to other devices of its node, in one direction; 0: unknown.
    """

    name: str
    accelerator: str
    memory: int
    flops: float = 0.0
    link: float = 0.0


_ROWS = """
T4            cuda   14    65    16
V100-32GB     cuda   31   125   150
A10           cuda   22   125    32
A100-40GB     cuda   39   312   300
A100-80GB     cuda   79   312   300
L4            cuda   22   121    32
L40S          cuda   44   362    32
RTX3090       cuda   23    71    32
RTX4090       cuda   23   165    32
H100          cuda   79   989   450
H200          cuda  139   989   450
B200          cuda  178  2250   900
MI250X        cuda   63   192   100
MI300X        cuda  191  1307   448
TPU-v4        tpu    32   275   150
TPU-v5e       tpu    16   197   100
TPU-v5p       tpu    95   459   300
Gaudi2        hpu    96   432   262
"""
"""Name, accelerator, GiB that programs can use, TFLOPS and GB/s to other devices of the node.

The last is NVLink's, Infinity Fabric's or ICI's, and PCI Express's where there is none of these.
Figures are those of the vendors' data sheets; a TPU's are Google's "TPU system architecture".
"""

DEVICES = {
    name: Device(name, accelerator, int(gib) * GIB, float(tflops) * 1e12, float(link) * 1e9)
    for name, accelerator, gib, tflops, link in map(str.split, _ROWS.split("\n")[1:-1])
}

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", re.IGNORECASE)


def find_device(name: str) -> Device:
    """Return a device by its name; case, blanks and hyphens do not matter.

    Raises:
        ConfigurationError: the table has no such device.

    Example:
        >>> find_device("a100 80gb").memory // 2**30
        79
    """
    wanted = re.sub(r"[\s_-]", "", name).casefold()
    for device in DEVICES.values():
        if device.name.replace("-", "").casefold() == wanted:
            return device
    alike = [one for one in DEVICES if one.casefold().startswith(wanted)]
    near = " or ".join(alike) or nearest_of(name, list(DEVICES))
    raise ConfigurationError(
        f"device={name!r} is not in the table of devices; expected one of {', '.join(DEVICES)}, or "
        "its memory, such as device_memory='80GB'" + (f". Did you mean {near}?" if near else "")
    )


def parse_size(size: float | str) -> int:
    """Return bytes of a size such as 8e10, "80GB" or "80 GiB".

    Raises:
        ConfigurationError: the value is not a size, or not more than 0.

    Example:
        >>> parse_size("80 GB"), parse_size("1.5KiB"), parse_size(8e10)
        (80000000000, 1536, 80000000000)
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    unit = _UNITS.get(found[2].upper()) if found else None
    try:
        value = float(found[1]) * unit if found and unit else float(size)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            f"{size!r} is not a size of memory: expected bytes, or a number with a unit, such as "
            "'80GB' or '80 GiB'"
        )
    return int(value)
