"""XPUAccelerator: Intel GPUs."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.accelerators import DeviceAccelerator, DeviceMemory
from stratagem.errors import ConfigurationError

_FULL = ("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")
_LOST = ("UR_RESULT_ERROR_DEVICE_LOST", "ZE_RESULT_ERROR_DEVICE_LOST")
"""How SYCL's runtime and Level Zero report it where torch has no error of its own."""


class XPUAccelerator(DeviceAccelerator):
    """Intel GPUs of this node; each tile is a device, unless Level Zero is set up otherwise.

    Example:
        >>> from stratagem_xpu.accelerator import XPUAccelerator
        >>> XPUAccelerator().device(1)
        device(type='xpu', index=1)
    """

    name = "xpu"
    # Weights-only-safe data of the ranks goes over gloo, so that it never waits for a GPU.
    process_group_backend = "cpu:gloo,xpu:xccl"
    sync_batchnorm_kernels = True

    def setup_device(self, device: torch.device) -> None:
        """Set the current device, and use it once; see `DeviceAccelerator`.

        Raises:
            ConfigurationError: the device has another type, or this process cannot use it.
        """
        try:
            super().setup_device(device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter: torch without XPU
            cause = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"the GPU {device} cannot be used by this process: {cause}. `stratagem doctor` "
                "shows which GPUs it can see, and `sycl-ls` which of them Level Zero supports"
            ) from error

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return torch's memory statistics, and the total memory of the device."""
        stats = self.device_stats(device)
        # Not mem_get_info, which some devices refuse.
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        return DeviceMemory(
            int(properties.total_memory),
            allocated=stats.get("allocated_bytes", 0),
            peak=stats.get("peak_allocated_bytes", 0),
            reserved=stats.get("reserved_bytes", 0),
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch, SYCL's runtime or Level Zero reports that a device's memory is full."""
        return super().is_out_of_memory(error) or any(text in str(error) for text in _FULL)

    def explain_lost_device(self, error: BaseException) -> str | None:
        """Return advice about a failed kernel or a device that was reset.

        None: another error.
        """
        if any(text in str(error) for text in _LOST):
            return (
                "the driver has reset the GPU (`dmesg` says why), and this process cannot use it "
                "any more"
            )
        return super().explain_lost_device(error)
