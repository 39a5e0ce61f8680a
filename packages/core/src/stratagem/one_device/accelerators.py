"""CPUAccelerator, and DeviceAccelerator for any other device that torch knows."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stratagem.accelerators import Accelerator, DeviceMemory
from stratagem.data import map_tensors, move_to_device
from stratagem.discovery import Availability
from stratagem.errors import ConfigurationError
from stratagem.one_device.plugin import cpu_availability
from stratagem.system import optional_module


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
        """Check that the device is the CPU, which needs no setup.

        Raises:
            ConfigurationError: the device is not the CPU.
        """
        if device.type != "cpu":
            raise ConfigurationError(f"CPUAccelerator expected the device cpu, received {device}")

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the CPU time and memory of this process, and the load and memory of the machine.

        Most figures come from /proc (see proc(5)). macOS has only `peak_resident_bytes` and
        `cpu_seconds`, and Windows only the latter.

        - `peak_resident_bytes`: the largest resident memory of this process so far.
        - `resident_bytes`: the resident memory of this process now.
        - `memory_available_bytes`, `memory_total_bytes`: the memory of the machine.
        - `load_average`: the mean number of running or waiting processes in the last minute.
        - `cpu_seconds`: the processor time of this process, over all threads.
        """
        stats: dict[str, Any] = {"cpu_seconds": time.process_time()}
        if (resource := optional_module("resource")) is not None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            # In bytes on macOS, elsewhere in KiB.
            unit = 1 if sys.platform == "darwin" else 1024
            stats["peak_resident_bytes"] = usage.ru_maxrss * unit
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            machine = dict(_memory_lines(Path("/proc/meminfo").read_text()))
            stats["load_average"] = float(Path("/proc/loadavg").read_text().split()[0])
        except OSError:
            return stats
        stats["resident_bytes"] = pages * mmap.PAGESIZE
        for name, line in (("available", "MemAvailable"), ("total", "MemTotal")):
            if line in machine:
                stats[f"memory_{name}_bytes"] = machine[line]
        return stats

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error is torch's failed allocation in host memory."""
        refused = "DefaultCPUAllocator: can't allocate memory" in str(error)
        return super().is_out_of_memory(error) or refused

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return this process's resident memory, and the memory of other processes."""
        stats = self.device_stats(device)
        own, total = stats.get("resident_bytes", 0), stats.get("memory_total_bytes")
        others: tuple[tuple[str, int], ...] = ()
        if total is not None and "memory_available_bytes" in stats:
            rest = total - stats["memory_available_bytes"] - own
            others = (("other processes and the system", max(0, rest)),)
        # The kernel updates the peak now and then only.
        return DeviceMemory(total, own, max(own, stats.get("peak_resident_bytes", 0)), own, others)


def _memory_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes (bytes) of /proc/meminfo."""
    for line in text.splitlines():
        name, _, size = line.partition(":")
        if size.endswith(" kB"):
            yield name, int(size.split()[0]) * 1024


_STATS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
}


class DeviceAccelerator(Accelerator):
    """The accelerator of this build of torch, or base class of a backend's accelerator.

    A backend's accelerator is a short subclass, which sets the further features of its devices:

        class XPUAccelerator(DeviceAccelerator):
            name = "xpu"
            sync_batchnorm_kernels = True

    The backend's plugin has a spec with its own probe, which does not import torch; see
    `AcceleratorSpec`.

    Args:
        device_type: the type in `torch.device(device_type, 0)`. Default: the class's `name`.

    Example:
        >>> from stratagem.accelerators import DeviceAccelerator
        >>> DeviceAccelerator("xpu").device(1)
        device(type='xpu', index=1)
    """

    name = ""
    process_group_backend = ""
    pins_memory = True

    def __init__(self, device_type: str | None = None) -> None:
        self.device_type = device_type or self.name
        if not self.device_type:
            raise ConfigurationError(
                "DeviceAccelerator(device_type=None): expected the type of device, as in "
                "DeviceAccelerator('xpu'), or a subclass with a name"
            )
        self.name = self.name or self.device_type
        if not self.process_group_backend:
            # Some register theirs with torch.distributed when their package is imported.
            known = dist.Backend.default_device_backend_map
            self.process_group_backend = known.get(self.device_type, "gloo")

    def availability(self) -> Availability:
        """Return the devices of this type, if that is the accelerator of this build of torch."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != self.device_type:
            return Availability(0, f"torch {torch.__version__} finds {found or 'no accelerator'}")
        count = torch.accelerator.device_count()
        return Availability(count, f"{count} devices")

    def device(self, index: int) -> torch.device:
        return torch.device(self.device_type, index)

    def fork_problem(self) -> str | None:
        """Return why not, once the devices are in use here."""
        module = torch.get_device_module(self.device_type)
        is_initialized = getattr(module, "is_initialized", lambda: False)
        if not is_initialized():
            return None
        return (
            f"has used {self.name} devices already, and they do not work in a copy: put no tensor "
            f"there before (no .to({self.device_type!r}), no torch.{self.device_type}.* call that "
            "needs a device)"
        )

    def setup_device(self, device: torch.device) -> None:
        """Make it torch's current device.

        Raises:
            ConfigurationError: the device has another type.
        """
        if device.type != self.device_type:
            raise ConfigurationError(
                f"{type(self).__name__} expected a device {self.device_type}, received {device}"
            )
        torch.accelerator.set_device_index(device.index)

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that copies batches on its stream; see `Accelerator.batch_mover`."""
        try:
            torch.empty(0, device=device).record_stream(torch.accelerator.current_stream(device))
        except NotImplementedError:
            return super().batch_mover(device)  # memory of this device belongs to no stream
        return _StreamMover(device)

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the memory that torch has taken and handed out, now and at most, in bytes."""
        stats = torch.accelerator.memory_stats(device)
        return {name: stats[key] for name, key in _STATS.items() if key in stats}

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return torch's memory statistics, and the total memory if torch can tell."""
        stats = self.device_stats(device)
        of_device = getattr(torch.get_device_module(self.device_type), "mem_get_info", None)
        total = None if of_device is None else of_device(device)[1]
        return DeviceMemory(
            total,
            allocated=stats.get("allocated_bytes", 0),
            peak=stats.get("peak_allocated_bytes", 0),
            reserved=stats.get("reserved_bytes", 0),
        )

    def explain_lost_device(self, error: BaseException) -> str | None:
        """Return it for torch's `AcceleratorError`, which comes from a kernel or the driver."""
        if not isinstance(error, torch.AcceleratorError):
            return None
        return (
            "Kernels run after the calls that started them, so that a line before this one may be "
            "the cause; this process cannot use the device any more"
        )


class _StreamMover:
    """Copies batches to a device on a separate stream, beside the computation of the previous step.

    The host queues a step and reads the next batch while the device still computes: on the
    computing stream the copy would wait for the end of the step. At most one batch is in flight. No
    batch is read ahead, so that the random numbers in a checkpoint keep their order. Batches
    outside of pinned memory (`DataLoader(pin_memory=True)`) are copied before this returns, as
    usual.

    Args:
        device: the target device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def __call__(self, batch: Any) -> Any:
        computing = torch.accelerator.current_stream(self._device)
        with self._stream:
            moved = move_to_device(batch, self._device)
        computing.wait_stream(self._stream)
        # Freed memory of this stream is not handed out again before the computation is done.
        map_tensors(lambda tensor: tensor.record_stream(computing), moved)
        return moved
