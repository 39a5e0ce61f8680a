"""LaptopAccelerator: the processor, with one core left to its owner."""

from __future__ import annotations

from stratagem.accelerators import CPUAccelerator
from stratagem.discovery import Availability
from stratagem_local_sgd.plugin import laptop_availability


class LaptopAccelerator(CPUAccelerator):
    """The processor under another name; differs in how many ranks `devices="auto"` means."""

    name = "laptop"

    def availability(self) -> Availability:
        """Return what the spec's probe finds, for those who pass an object."""
        return laptop_availability()
