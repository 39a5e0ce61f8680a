"""HPUAccelerator: Intel Gaudi devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from stratagem.accelerators import Accelerator
from stratagem.discovery import Availability
from stratagem.errors import ConfigurationError
from stratagem_hpu_ipu.hpu_library import is_loaded, load_sdk
from stratagem_hpu_ipu.hpu_probe import hpu_availability

_STATS = {
    "limit_bytes": "Limit",
    "allocated_bytes": "InUse",
    "peak_allocated_bytes": "MaxInUse",
    "allocations": "NumAllocs",
}


class HPUAccelerator(Accelerator):
    """Gaudi devices of this node. They have no index: each process has its own single device.

    The SDK is imported on the ranks, and before only if mixed precision queries its features.

    Args:
        lazy_mode: collect operations into graphs, which run at the end of a step; None: the value
            of PT_HPU_LAZY_MODE, or the SDK's default.

    Example:
        >>> from stratagem_hpu_ipu.hpu_accelerator import HPUAccelerator
        >>> HPUAccelerator(lazy_mode=True).device(1)
        device(type='hpu')
    """

    name = "hpu"
    process_group_backend = "hccl"
    requires_dedicated_strategies = True

    def __init__(self, *, lazy_mode: bool | None = None) -> None:
        self.lazy_mode = lazy_mode

    def availability(self) -> Availability:
        return hpu_availability()

    def device(self, index: int) -> torch.device:
        return torch.device("hpu")

    def fork_problem(self) -> str | None:
        """Return why not, once the SDK is there: its threads and handles are not copied."""
        if not is_loaded():
            return None
        return (
            "has imported the Gaudi SDK already, which does not work in a copy: import "
            "habana_frameworks on the ranks only"
        )

    def setup(self) -> None:
        """Import the SDK.

        Raises:
            ConfigurationError: it cannot be imported, or was imported in the other mode.
        """
        load_sdk(self.lazy_mode)

    def setup_device(self, device: torch.device) -> None:
        """Check that the device is a Gaudi; a process acquires its own at the first use.

        Raises:
            ConfigurationError: the device has another type.
        """
        if device.type != "hpu":
            raise ConfigurationError(f"HPUAccelerator expected the device hpu, received {device}")

    def synchronize(self, device: torch.device) -> None:
        load_sdk(self.lazy_mode).hpu.synchronize()

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the device's memory in bytes: its size, and the present and peak use."""
        stats = load_sdk(self.lazy_mode).hpu.memory_stats()
        return {name: stats[key] for name, key in _STATS.items() if key in stats}

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        load_sdk(self.lazy_mode)
        return super().autocast(dtype)
