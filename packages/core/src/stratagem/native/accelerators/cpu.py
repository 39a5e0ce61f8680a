"""CPUAccelerator: the processor, and the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.discovery.specs import Availability
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
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
        """Return this process's peak resident memory, in bytes."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_resident_bytes": peak * 1024}
