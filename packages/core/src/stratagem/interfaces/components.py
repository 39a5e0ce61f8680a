"""Components: what a strategy is composed of."""

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
    """What a strategy is composed of: the plan's choices, built. Handed over by `Strategy.bind`.

    Attributes:
        accelerator: the kind of device.
        precision: dtypes, and the scaling of losses.
        checkpoint_io: how checkpoints get to storage and back.
        cluster_environment: where this process learns its rank.
        devices: device indices of this node, one for each local process (or all of them, for a
            strategy that drives several devices from one process).
        num_nodes: machines taking part.
        step: how the Trainer takes its steps; None under Lite, whose user clips and accumulates in
            a loop of their own.

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
        """How many devices take part on all nodes."""
        return len(self.devices) * self.num_nodes
