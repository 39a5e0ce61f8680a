"""What libraries ask Lightning's accelerator connector, which is private to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stratagem.accelerators import Accelerator
from stratagem.lite import Lite
from stratagem.strategies import ParallelStrategy

if TYPE_CHECKING:
    from stratagem_lightning.api.trainer import Trainer


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


class TrainerConnector:
    """The components that were chosen for a Trainer; `trainer._accelerator_connector`.

    Args:
        trainer: a Trainer.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> Trainer(accelerator="cpu")._accelerator_connector.is_distributed
        False
    """

    def __init__(self, trainer: Trainer) -> None:
        self.strategy, self.accelerator = trainer.strategy, trainer.accelerator
        self.precision_plugin = trainer.precision_plugin
        self.use_distributed_sampler = trainer.use_distributed_sampler
        plan = trainer.plan
        self.cluster_environment = trainer.strategy.cluster_environment
        self._accelerator_flag = plan.accelerator.name
        self._strategy_flag: Any = plan.strategy.name
        self._precision_flag = trainer.precision
        self._num_nodes_flag = plan.num_nodes
        self._devices_flag = len(plan.devices)

    @property
    def is_distributed(self) -> bool:
        """Whether several processes may train together."""
        return isinstance(self.strategy, ParallelStrategy)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this node, one for each of its processes."""
        indices = range(self._devices_flag)
        return [self.accelerator.device(index) for index in indices]

    _parallel_devices = parallel_devices
