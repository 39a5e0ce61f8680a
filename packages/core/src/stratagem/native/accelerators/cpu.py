"""CPUAccelerator: the processor, and the host's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stratagem.discovery.specs import Availability
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator, DeviceMemory
from stratagem.native.plugin import cpu_availability


class CPUAccelerator(Accelerator):
    """The processor: one torch device, shared by any number of ranks.

    Example:
        >>> from stratagem.accelerators import CPUAccelerator
        >>> CPUAccelerator().device(3)
        device(type='cpu')
    """

    name = "cpu"
    process_group_backend = "gloo"

    def availability(self) -> Availability:
        """Return the number of cores."""
        return cpu_availability()

    def device(self, index: int) -> torch.device:
        """Return the CPU, whatever the index."""
        return torch.device("cpu")

    def setup_device(self, device: torch.device) -> None:
        """Check that it is the CPU; there is nothing to set.

        Raises:
            ConfigurationError: it is another device.
        """
        if device.type != "cpu":
            raise ConfigurationError(f"CPUAccelerator expected the device cpu, received {device}")

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return what of the machine's time and memory is in use, and what this process holds.

        From /proc (see proc(5)), so that on another system than Linux there is only the peak:

        - `peak_resident_bytes`: the most memory that this process has had, resident.
        - `resident_bytes`: what it has now.
        - `memory_available_bytes`, `memory_total_bytes`: of the machine.
        - `load_average`: processes that ran or waited to run, over the last minute.
        - `cpu_seconds`: processor time of this process, all threads.
        """
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        stats = {
            "peak_resident_bytes": usage.ru_maxrss * 1024,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            machine = dict(_memory_lines(Path("/proc/meminfo").read_text()))
            stats["load_average"] = os.getloadavg()[0]
        except OSError:
            return stats
        stats["resident_bytes"] = pages * resource.getpagesize()
        for name, line in (("available", "MemAvailable"), ("total", "MemTotal")):
            if line in machine:
                stats[f"memory_{name}_bytes"] = machine[line]
        return stats

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether it is torch's error of an allocation in the host's memory."""
        refused = "DefaultCPUAllocator: can't allocate memory" in str(error)
        return super().is_out_of_memory(error) or refused

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return what this process has, resident; the others hold what is not available."""
        stats = self.device_stats(device)
        own, total = stats.get("resident_bytes", 0), stats.get("memory_total_bytes")
        others: tuple[tuple[str, int], ...] = ()
        if total is not None and "memory_available_bytes" in stats:
            rest = total - stats["memory_available_bytes"] - own
            others = (("other processes and the system", max(0, rest)),)
        # The kernel updates the peak now and then only.
        return DeviceMemory(total, own, max(own, stats["peak_resident_bytes"]), own, others)


def _memory_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes (bytes) of /proc/meminfo."""
    for line in text.splitlines():
        name, _, size = line.partition(":")
        if size.endswith(" kB"):
            yield name, int(size.split()[0]) * 1024
