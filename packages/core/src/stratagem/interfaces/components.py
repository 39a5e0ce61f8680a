"""Components: the parts of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.precision import Precision
from stratagem.plan.step_options import StepOptions


@final
@dataclass(frozen=True)
class Components:
    """The components of a strategy, built from the plan. `Strategy.bind` receives them.

    Attributes:
        accelerator: the type of device.
        precision: the dtypes, and the scaling of losses.
        checkpoint_io: the storage of checkpoints.
        cluster_environment: the source of this process's rank.
        devices: device indices of this node, one for each local process (or all of them, for a
            strategy that drives several devices from one process).
        num_nodes: the number of nodes.
        step: the options of the Trainer's steps; None under Lite, where the user's own loop clips
            and accumulates.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", gradient_clip_val=1.0, logger=False)
        >>> components = trainer.strategy.components
        >>> components.step.clip.value, components.device_count
        (1.0, 1)
    """

    accelerator: Accelerator
    precision: Precision
    checkpoint_io: CheckpointIO
    cluster_environment: ClusterEnvironment
    devices: tuple[int, ...]
    num_nodes: int = 1
    step: StepOptions | None = None

    @property
    def device_count(self) -> int:
        """The number of devices on all nodes."""
        return len(self.devices) * self.num_nodes
