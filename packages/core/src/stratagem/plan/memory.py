"""StepMemory: what a process holds in a step, and a rank of several."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from stratagem.discovery.specs import StrategySpec


@dataclass(frozen=True)
class StepMemory:
    """The memory of a process during an optimizer step, in bytes.

    `StepMemory.USABLE` is the part of a device's memory that plans fill: allocators keep some, and
    libraries too.

    Attributes:
        parameters, gradients, optimizer, buffers: the size of this part of the model's state.
        working: other memory: activations, inputs, gathered parameters, and buffers of
            communication and kernels.
        sent: the bytes that the process passes to collectives in the step.
        flops: the number of floating-point operations in the step, not bytes.

    Example:
        >>> from stratagem.strategies import StepMemory
        >>> alone = StepMemory(parameters=8, gradients=8, optimizer=16, buffers=0, working=4)
        >>> alone.total, alone.divided(4, ["optimizer"]).total
        (36, 24)
    """

    USABLE: ClassVar[float] = 0.9

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    working: int
    sent: int = 0
    flops: int = 0

    @property
    def total(self) -> int:
        """The memory of the process, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.working

    def divided(self, ranks: int, shards: Collection[str]) -> StepMemory:
        """Return the memory of a rank if this number of ranks shard these fields."""
        return replace(self, **{part: -(-getattr(self, part) // ranks) for part in shards})

    def on_device(self, spec: StrategySpec, ranks: int) -> int:
        """Return the memory of a rank on its device, according to a strategy's spec."""
        held = self.divided(ranks, spec.shards)
        return replace(held, **dict.fromkeys(spec.offloads, 0)).total
