"""MPSAccelerator: the backend's, with what Lightning's class answers without an object."""

from __future__ import annotations

from typing import Any

import torch

from stratagem import accelerators
from stratagem.plan import parse_devices
from stratagem_lightning.api.accelerators.accelerator import check_device_type
from stratagem_lightning.api.instance_check import InstanceCheck, of_class

# Served by the backend that provides it; an error names the one to install.
_MPSAccelerator: Any = accelerators.MPSAccelerator  # type: ignore[attr-defined]


class MPSAccelerator(_MPSAccelerator, metaclass=InstanceCheck):  # type: ignore[misc]
    """Apple silicon's GPU."""

    is_instance = of_class(_MPSAccelerator)

    def setup_device(self, device: torch.device) -> None:
        """Select the device, which must be of this type."""
        check_device_type(device, "mps")
        super().setup_device(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return the indices of the GPUs for a number or a list of devices.

        Raises:
            ConfigurationError: the value has another form.
        """
        return list(parse_devices(devices, accelerators.Availability(1, ""), "mps"))

    @staticmethod
    def get_parallel_devices(devices: int | str | list[int]) -> list[torch.device]:
        """Return the devices with these indices."""
        return [torch.device("mps", index) for index in MPSAccelerator.parse_devices(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: a Mac has one such GPU."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether this process can use the GPU."""
        return torch.backends.mps.is_available()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return statistics of the GPU."""
        stats: dict[str, Any] = self.device_stats(torch.device(device))
        return stats
