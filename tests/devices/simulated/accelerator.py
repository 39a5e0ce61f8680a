"""The accelerator of the simulated device: what a backend's author has to write."""

from __future__ import annotations

from simulated import NAME, load
from simulated.process_group import BACKEND, register
from stratagem.accelerators import DeviceAccelerator


class SimulatedAccelerator(DeviceAccelerator):
    """Four devices in host memory."""

    name = NAME
    process_group_backend = BACKEND

    def __init__(self) -> None:
        load()
        register(NAME)
        super().__init__()
