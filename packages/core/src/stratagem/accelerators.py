"""Accelerator classes, and the bases to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.discovery.specs import Availability as Availability
    from stratagem.interfaces.accelerator import (
        Accelerator as Accelerator,
        DeviceMemory as DeviceMemory,
    )
    from stratagem.one_device.accelerators import (
        CPUAccelerator as CPUAccelerator,
        DeviceAccelerator as DeviceAccelerator,
    )
    from stratagem_extras.memory_report import memory_report as memory_report
else:
    __getattr__, __dir__ = exporter(__name__, "accelerator")
