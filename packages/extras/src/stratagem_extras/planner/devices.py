"""Figures of devices, by the names that people use for them; and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
        network: bytes per second of a device to other nodes, in one direction.
    """

    name: str
    accelerator: str
    memory: int
    flops: float = 0.0
    link: float = 0.0
    network: float = 25e9

    def between(self, ranks: int, nodes: int) -> float:
        """Return the bytes per second of a rank in a ring over several ranks; 0: unknown.

        A ring enters a node once, and NCCL opens as many rings as a node has network cards, one for
        each device. So the ranks that a ring has on a node share the cards of their devices.

        Args:
            ranks: the number of the ring's ranks on each node.
            nodes: the number of nodes.

        Example:
            >>> h100 = find_device("H100")
            >>> h100.between(8, 1) / 1e9, h100.between(8, 2) / 1e9, h100.between(1, 2) / 1e9
            (450.0, 400.0, 50.0)
        """
        return self.link if nodes == 1 else min(self.link, self.network * ranks)


_ROWS = """
T4            cuda   14    65    16    25
V100-32GB     cuda   31   125   150    25
A10           cuda   22   125    32    25
A100-40GB     cuda   39   312   300    25
A100-80GB     cuda   79   312   300    25
L4            cuda   22   121    32    25
L40S          cuda   44   362    32    25
RTX3090       cuda   23    71    32    25
RTX4090       cuda   23   165    32    25
H100          cuda   79   989   450    50
H200          cuda  139   989   450    50
B200          cuda  178  2250   900    50
MI250X        cuda   63   192   100    12
MI300X        cuda  191  1307   448    50
TPU-v4        tpu    32   275   150   150
TPU-v5e       tpu    16   197   100   100
TPU-v5p       tpu    95   459   300   300
Gaudi2        hpu    96   432   262    37
"""
"""Name, accelerator, GiB that programs can use, TFLOPS, GB/s to devices of the node and to others.

The first of GB/s is NVLink's, Infinity Fabric's or ICI's, and PCI Express's where there is none of
these. The last is the share of a device in the network cards of its usual node: 8 cards of 400 Gb/s
for 8 devices in DGX H100, H200 and B200 (NVIDIA's "DGX BasePOD") and with MI300X, 8 of 200 Gb/s in
DGX A100, 4 of 200 Gb/s for 8 dies of MI250X (Frontier), 3 ports of 100 Gb/s of a Gaudi2, and ICI
for TPUs. For the others it is a card of 200 Gb/s for each device. Figures are those of the vendors'
data sheets; a TPU's are Google's "TPU system architecture".
"""

DEVICES = {
    name: Device(name, accelerator, int(gib) * GIB, *(float(n) * 1e9 for n in (tflops + "e3", *gb)))
    for name, accelerator, gib, tflops, *gb in map(str.split, _ROWS.split("\n")[1:-1])
}

_FIGURES = ("flops", "link", "network")
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


def with_figures(device: Device, figures: Mapping[str, float]) -> Device:
    """Return a device with some of its figures replaced.

    Args:
        device: the device.
        figures: "flops", "link" and "network", as in `Device`.

    Raises:
        ConfigurationError: a name is unknown, or a figure is not a number above 0.

    Example:
        >>> with_figures(find_device("H100"), {"network": 100e9}).network
        100000000000.0
    """
    for name, value in figures.items():
        if name not in _FIGURES:
            near = nearest_of(name, _FIGURES)
            raise ConfigurationError(
                f"figures has {name!r}: expected 'flops', 'link' or 'network'"
                + (f"; did you mean {near!r}?" if near else "")
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            raise ConfigurationError(
                f"figures has {name!r}: {value!r}: expected a number above 0 for 'flops', "
                "operations a second in bfloat16, or for 'link' or 'network', bytes a second to "
                "the devices of the node or to other nodes"
            )
    return replace(device, **dict[str, Any](figures))
