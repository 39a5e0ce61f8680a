"""Installation hints: the missing distribution that provides a name or supports a GPU."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Collection, Mapping

from stratagem.discovery.entry_points import read_text

NVIDIA = "/proc/driver/nvidia/gpus"
"""The folder in which NVIDIA's driver describes its GPUs."""
PCI = "/sys/bus/pci/devices"
_VENDORS = {"0x10de": ("NVIDIA", "cuda"), "0x1002": ("AMD", "cuda"), "0x8086": ("Intel", "xpu")}
"""Vendors of GPUs by their number on the PCI bus, with the accelerator of their GPUs."""

_THIRD_PARTIES = {
    "colossalai": "colossalai",
    "bagua": "bagua",
    "hivemind": "hivemind",
    "torchft": "torchft-nightly",
}


@functools.cache
def _known() -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the known names by distribution and kind; scripts/known_names.py writes the file."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for line in read_text(f"{os.path.dirname(__file__)}/known_names.txt").splitlines():  # noqa: PTH120 - pathlib is slow to import
        head, _, names = line.partition(": ")
        distribution, _, kind = head.partition(" ")
        found[distribution, kind] = tuple(names.split(", "))
    return found


def distribution_of(name: str, kind: str | None = None) -> str | None:
    """Return the Stratagem distribution that provides a name.

    None: the name is unknown.

    Args:
        name: the name of a component or a command, or an import name.
        kind: "strategy", "callback" and so on, "command", or the module that serves an import
            name, such as "stratagem.callbacks"; None: any kind except a module.

    Example:
        >>> from stratagem.discovery import distribution_of
        >>> distribution_of("LearningRateMonitor", "stratagem.callbacks")
        'stratagem-extras'
    """
    of_kind = {
        key: names
        for key, names in _known().items()
        if (not _is_module(key[1]) if kind is None else key[1] == kind)
    }
    wanted = name if kind is not None and _is_module(kind) else name.casefold()
    if wanted == "gpu" and sys.platform == "darwin":
        wanted = "mps"
    for (distribution, _), names in of_kind.items():
        if wanted in names:
            return distribution
    # A misspelled name of a family, such as deepspeed_stage_3_offlod, is found by its first word.
    family = wanted.partition("_")[0]
    for (distribution, its_kind), names in of_kind.items():
        if its_kind == "strategy" and family in names:
            return distribution
    return None


def modules_of_import(name: str) -> list[str]:
    """Return the modules of core that serve an import name of another distribution.

    Example:
        >>> modules_of_import("LearningRateMonitor")
        ['stratagem.callbacks']
    """
    return [kind for (_, kind), names in _known().items() if _is_module(kind) and name in names]


def names_by_distribution() -> dict[str, tuple[str, ...]]:
    """Return the components and commands of each of our other distributions, installed or not."""
    found: dict[str, tuple[str, ...]] = {}
    for (distribution, kind), names in _known().items():
        more = () if _is_module(kind) else names
        found[distribution] = tuple(dict.fromkeys((*found.get(distribution, ()), *more)))
    return found


def _is_module(kind: str) -> bool:
    return kind.partition(".")[0] == "stratagem"


def installation_hint(name: str, kind: str | None = None, subject: str = "It") -> str:
    """Return a sentence naming the package to install for a name; "": the name is unknown."""
    distribution = distribution_of(name, kind)
    if distribution is not None:
        return (
            f"{subject} needs {distribution}, which is not installed: pip install {distribution}."
        )
    package = _THIRD_PARTIES.get(name.casefold())
    if package is not None:
        return (
            f"It is a third party's: install a distribution that wraps the package {package!r} "
            "and declares an entry point in the group 'stratagem.backends'."
        )
    return ""


def missing_backend(accelerator: object, installed: Collection[str]) -> str:
    """Return a hint to install the backend of a GPU of this machine; "": no hint.

    Args:
        accelerator: the argument of the run; only "auto" gets a hint.
        installed: names of the installed accelerators.
    """
    needed = [name for name in gpus().values() if name not in ("", *installed)]
    if accelerator != "auto" or not needed:
        return ""
    backend = distribution_of(needed[0], "accelerator")
    return f"this machine has a GPU that needs {backend}: pip install {backend}"


def gpus() -> dict[str, str]:
    """Return a line for each GPU of this machine, with the accelerator that it needs.

    The accelerator is "" for a GPU that may be good for pictures only. The lines come from the
    kernel's files: running nvidia-smi could take several seconds.
    """
    if sys.platform == "darwin":
        return {"the GPU of Apple silicon": "mps"} if os.uname().machine == "arm64" else {}
    found = {}
    try:
        devices = sorted(os.listdir(PCI))  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return {}
    for device in devices:
        vendor = read_text(f"{PCI}/{device}/vendor").strip()
        kind = read_text(f"{PCI}/{device}/class")
        # Displays; and AMD's processing accelerators, of which Intel has others.
        if (vendor in _VENDORS and kind[:4] == "0x03") or (vendor, kind[:4]) == ("0x1002", "0x12"):
            name, needed = _VENDORS[vendor]
            text = read_text(f"{NVIDIA}/{device}/information")
            model = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
            driver = os.path.realpath(f"{PCI}/{device}/driver").rpartition("/")[2]
            of_laptops = kind[:6] == "0x0300" and name != "NVIDIA"
            line = f"{device}: {model[1] if model else name}, driver {driver}"
            found[line.replace("driver driver", "no driver")] = "" if of_laptops else needed
    return found
