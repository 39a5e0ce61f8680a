"""Lightning's accelerators: ours, with the questions that its classes answer without an object."""

from __future__ import annotations

from typing import Any

import torch

from stratagem import accelerators
from stratagem.errors import ConfigurationError
from stratagem.lightning.api.instance_check import InstanceCheck, of_class


class CPUAccelerator(accelerators.CPUAccelerator, metaclass=InstanceCheck):
    """The processor."""

    is_instance = of_class(accelerators.CPUAccelerator)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Return a number of processes.

        Raises:
            ConfigurationError: it is none.
        """
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ConfigurationError(
                f"devices={devices!r} with accelerator='cpu': expected a number above 0"
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: int | str | list[int]) -> list[torch.device]:
        """Return the devices of so many processes."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return how many devices "auto" takes."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether there is one."""
        return True

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return what is in use."""
        return self.device_stats(torch.device(device))


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of GPUs on which memory can be allocated.

    Args:
        num_devices: how many; -1: all.

    Raises:
        ConfigurationError: there are not as many.
    """
    usable: list[int] = []
    for index in range(torch.cuda.device_count()):
        if num_devices not in (-1, 0) and len(usable) == num_devices:
            break
        try:
            torch.tensor(0.0, device=torch.device("cuda", index))
        except RuntimeError:  # exclusive, and another process has it
            continue
        usable.append(index)
    if num_devices > len(usable):
        raise ConfigurationError(
            f"num_devices={num_devices}: expected at most the {len(usable)} GPUs that are usable "
            f"of {torch.cuda.device_count()}"
        )
    return usable
