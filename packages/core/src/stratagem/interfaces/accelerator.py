"""Accelerator: a kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from stratagem.discovery.specs import Availability


class Accelerator(ABC):
    """A kind of device: how many there are, how to address one, and how to set one up.

    Call sequence:
        1. `availability()`, where a request is resolved (for an object; for a discovered one the
           spec's probe is asked instead, without importing this class).
        2. On every rank, by `Strategy.setup_environment`: `device(index)`, `setup()`, then
           `setup_device(device)`.
        3. On every rank, at the end: `teardown()`.

    Example:
        >>> from stratagem.accelerators import CPUAccelerator
        >>> CPUAccelerator().device(0)
        device(type='cpu')
    """

    name: ClassVar[str]
    """The name that strategies list in their capabilities."""
    process_group_backend: ClassVar[str]
    """The torch.distributed backend for its tensors ("gloo", "nccl", ...)."""

    @abstractmethod
    def availability(self) -> Availability:
        """Return how many devices can be used here, and why."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """Return the device with this index on this node."""

    def setup(self) -> None:
        """Prepare this process; once a rank, before `setup_device`."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""

    def teardown(self) -> None:
        """Release what `setup` and `setup_device` took."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all queued work; for timing."""

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return memory figures and the like, by name, in bytes; empty if there are none."""
        return {}
