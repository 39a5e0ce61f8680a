"""Which IPUs this process can use, or why none: without torch and without poptorch.

Cards in this machine have device nodes. Those of a Pod are reached over a network, and described by
a file or by the address of a V-IPU server; how many a partition has is known to poptorch alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping

from stratagem.discovery import Availability

DEVICES = "/dev"
CONFIGS = ("~/.ipuof.conf.d", "/etc/ipuof.conf.d")
EMULATED = "POPTORCH_IPU_MODEL"
_FABRIC = ("IPUOF_CONFIG_PATH", "IPUOF_VIPU_API_PARTITION_ID")


def ipu_availability() -> Availability:
    """Return the IPUs that this process can use, or the reason for having no IPU."""
    if importlib.util.find_spec("poptorch") is None:
        return availability(os.environ, sdk=False, cards=0, configs=[])
    from pathlib import Path  # slow to import, and mostly for nothing

    nodes = Path(DEVICES).glob("ipu*")
    folders = [Path(folder).expanduser() for folder in CONFIGS]
    return availability(
        os.environ,
        sdk=True,
        cards=sum(bool(re.fullmatch(r"ipu\d+", node.name)) for node in nodes),
        configs=[str(file) for folder in folders for file in sorted(folder.glob("*.conf*"))],
    )


def availability(
    environ: Mapping[str, str], *, sdk: bool, cards: int, configs: list[str]
) -> Availability:
    """Return the availability that follows from these facts.

    Args:
        environ: environment variables.
        sdk: whether poptorch is installed.
        cards: IPUs in this machine.
        configs: files that describe partitions of a Pod.

    Example:
        >>> from stratagem_hpu_ipu.ipu_probe import availability
        >>> availability({}, sdk=True, cards=2, configs=[]).reason
        '2 IPU(s) in this machine'
        >>> availability({"POPTORCH_IPU_MODEL": "1"}, sdk=True, cards=0, configs=[]).count
        1
    """
    if not sdk:
        return Availability(
            0,
            "the Poplar SDK is not enabled (no package poptorch; it comes with the SDK, see "
            "https://docs.graphcore.ai)",
        )
    if is_emulated(environ):
        return Availability(1, f"emulated on the CPU ({EMULATED})", indexed=False)
    if cards:
        return Availability(cards, f"{cards} IPU(s) in this machine")
    fabric = [f"{name}={environ[name]}" for name in _FABRIC if environ.get(name)]
    if fabric or configs:
        where = (fabric or configs)[0]
        return Availability(1, f"a partition of a Pod ({where})", indexed=False)
    return Availability(
        0,
        "there is no IPU: no /dev/ipu0, no partition of a Pod (IPUOF_CONFIG_PATH, "
        f"IPUOF_VIPU_API_PARTITION_ID, ~/.ipuof.conf.d); {EMULATED}=1 emulates one",
    )


def is_emulated(environ: Mapping[str, str]) -> bool:
    """Return whether poptorch is told to emulate IPUs on the CPU."""
    return environ.get(EMULATED, "0") not in ("", "0")
