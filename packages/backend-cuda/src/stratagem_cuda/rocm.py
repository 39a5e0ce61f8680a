"""AMD's GPUs, as the kernel lists them in /sys/class/kfd.

They are read for a build of torch with ROCm, and to say which build a machine needs. Neither torch
nor a library of ROCm is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stratagem.discovery import read_text
from stratagem_cuda.gpu import GPU

if TYPE_CHECKING:
    from pathlib import Path  # slow to import

NODES = "/sys/class/kfd/kfd/topology/nodes"
DEVICE = "/dev/kfd"
HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP reads the first that is set. ROCR_VISIBLE_DEVICES comes before: it hides GPUs from HIP."""
FLOAT8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
"""The GPUs with float8 products in torch: MI300, MI350 and the Radeon RX 9000 series."""


def find_gpus() -> list[GPU]:
    """Return the AMD GPUs of this machine that this process may read about."""
    if not os.path.isdir(NODES):  # noqa: PTH112 - pathlib is slow
        return []
    from pathlib import Path

    return list(gpus_of(Path(NODES), Path(DEVICE)))


def gpus_of(nodes: Path, device: Path) -> Iterator[GPU]:
    """Yield the GPUs; a node without SIMD units is a processor.

    Args:
        nodes: the kernel's list of nodes.
        device: the device node that every program with ROCm opens.
    """
    problem = ""
    if not device.exists():
        problem = f"cannot be used: there is no {device} (a container needs it handed in)"
    elif not os.access(device, os.R_OK | os.W_OK):
        problem = f"cannot be used: this user cannot open {device}; join the group 'render'"
    index = 0
    for node in sorted(nodes.glob("*"), key=lambda each: (len(each.name), each.name)):
        facts = _numbers(node / "properties")
        # Files that a container may not see are unreadable.
        if not facts.get("simd_count"):
            continue
        banks = (_numbers(bank / "properties") for bank in node.glob("mem_banks/*"))
        # Heap types 1 and 2 are the GPU's own memory, with and without access by the host.
        sizes = [bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in (1, 2)]
        name = architecture(facts.get("gfx_target_version", 0))
        uuid = f"GPU-{facts.get('unique_id', 0):016x}"
        yield GPU(index, uuid, f"AMD {name}", problem, sum(sizes) or None)
        index += 1


def architecture(version: int) -> str:
    """Return the name of an architecture.

    Args:
        version: the kernel's gfx_target_version, such as 90402.

    Example:
        >>> from stratagem_cuda.rocm import architecture
        >>> architecture(90402), architecture(90010), architecture(110000)
        ('gfx942', 'gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"


def visible_by(environ: Mapping[str, str]) -> tuple[str | None, str | None, str]:
    """Return ROCR_VISIBLE_DEVICES, the value of HIP's own variable, and the name of the latter.

    Args:
        environ: environment variables.
    """
    name = next((each for each in HIP_VARIABLES if each in environ), HIP_VARIABLES[0])
    return environ.get("ROCR_VISIBLE_DEVICES"), environ.get(name), name


def why_no_float8(precision: str, architectures: list[str]) -> str:
    """Return why none of these GPUs computes in float8, or ""; no GPU: "", nothing is known."""
    if not architectures or any(each.endswith(FLOAT8) for each in architectures):
        return ""
    return (
        f"precision={precision!r} needs a GPU with float8 arithmetic (AMD's MI300, MI350 and RX "
        f"9000: {', '.join(FLOAT8)}): here is {', '.join(dict.fromkeys(architectures))}. Pass "
        "precision='bf16-mixed'"
    )


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file of "name number" lines; {} if it cannot be read."""
    lines = (line.split() for line in read_text(str(file)).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
