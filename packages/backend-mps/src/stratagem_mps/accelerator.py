"""MPSAccelerator: Apple silicon's GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stratagem.accelerators import Accelerator, DeviceAccelerator, DeviceMemory
from stratagem.errors import ConfigurationError
from stratagem_mps.probe import has_bfloat16, macos_version

_FULL = ("MPS backend out of memory", "Invalid buffer size", "kIOGPUCommandBufferCallbackErrorOut")
"""Parts of the errors of torch's allocator, of a buffer beyond Metal's limit, and of a command
buffer that found no memory."""


class MPSAccelerator(DeviceAccelerator):
    """Apple silicon's GPU: one device, which shares the memory of the machine.

    Example:
        >>> from stratagem_mps.accelerator import MPSAccelerator
        >>> MPSAccelerator().device(0)
        device(type='mps', index=0)
    """

    name = "mps"
    process_group_backend = "gloo"
    pins_memory = False
    memory_advice = (
        "torch's allocator stops at PYTORCH_MPS_HIGH_WATERMARK_RATIO times the memory that Metal "
        "recommends for this GPU (1.7 by default). Other programs share that memory: close some, "
        "or take a smaller batch, before you set a higher ratio. 0.0 removes the limit, and macOS "
        "may then swap or stop responding"
    )

    @property
    def _torch(self) -> Any:
        """The module of torch for this device, `torch.mps`."""
        return torch.get_device_module(self.device_type)

    def setup_device(self, device: torch.device) -> None:
        """Check that the device is the single device of this type; it needs no setup.

        Raises:
            ConfigurationError: the device is another device.
        """
        if device.type != self.device_type or device.index not in (None, 0):
            raise ConfigurationError(
                f"MPSAccelerator expected the device {self.device(0)}, received {device}: a Mac "
                "has one, so pass devices=1"
            )

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that moves batches; MPS has no second stream to copy on."""
        return Accelerator.batch_mover(self, device)

    def synchronize(self, device: torch.device) -> None:
        self._torch.synchronize()

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the memory that tensors and torch's allocator hold, and Metal's recommendation.

        torch counts no peak on this device.
        """
        return {
            "allocated_bytes": self._torch.current_allocated_memory(),
            "reserved_bytes": self._torch.driver_allocated_memory(),
            "recommended_bytes": self._torch.recommended_max_memory(),
        }

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return the use of the memory that Metal recommends for this GPU at most."""
        stats = self.device_stats(device)
        allocated, reserved = stats["allocated_bytes"], stats["reserved_bytes"]
        return DeviceMemory(stats["recommended_bytes"], allocated, allocated, reserved)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch's allocator or Metal reports that memory is full."""
        return super().is_out_of_memory(error) or any(text in str(error) for text in _FULL)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        if dtype is torch.bfloat16 and not has_bfloat16(macos_version()):
            return None
        return super().autocast(dtype)
