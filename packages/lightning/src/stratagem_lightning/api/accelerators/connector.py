"""What scvi-tools asks Lightning's accelerator connector: which devices a Trainer would take."""

from __future__ import annotations

from stratagem.accelerators import Accelerator
from stratagem.lite import Lite


class AcceleratorConnector:
    """The accelerator and the devices that are chosen for these arguments.

    Args:
        accelerator: as for a Trainer.
        devices: as for a Trainer.

    Example:
        >>> chosen = AcceleratorConnector(accelerator="cpu", devices=2)
        >>> chosen._accelerator_flag, chosen._devices_flag
        ('cpu', 2)
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        devices: int | str | list[int] = "auto",
    ) -> None:
        plan = Lite(accelerator=accelerator, devices=devices).plan
        self._accelerator_flag = plan.accelerator.name
        """Its name."""
        is_cpu = self._accelerator_flag == "cpu"
        self._devices_flag = len(plan.devices) if is_cpu else list(plan.devices)
        """How many processes; of an accelerator that is not the processor: the devices' indices."""
