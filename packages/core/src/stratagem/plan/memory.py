"""Which strategies a model would fit with: an estimate from what one rank held; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from stratagem.discovery.specs import StrategySpec
from stratagem.errors import format_size

if TYPE_CHECKING:
    from torch import nn


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


def memory_to_train(module: nn.Module, bytes_per_weight: int | None = None) -> StepMemory:
    """Return the memory of a process that trains a model alone, without activations.

    Since the optimizer is unknown yet, the result assumes two numbers for each weight, as in Adam.

    Args:
        module: the model. Parameters that it creates later are not counted.
        bytes_per_weight: the size of a floating-point weight in training. Default: its current
            size.
    """
    whole = trained = 0
    for parameter in module.parameters():
        converted = bytes_per_weight if parameter.is_floating_point() else None
        size = parameter.numel() * (converted or parameter.element_size())
        whole += size
        trained += size if parameter.requires_grad else 0
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return StepMemory(whole, trained, 2 * trained, buffers, working=0)


def what_would_fit(
    need: StepMemory,
    capacity: int,
    specs: Iterable[StrategySpec],
    *,
    ranks: int,
    micro_batches: int = 1,
) -> list[str]:
    """Return suggestions that make training fit into a device's memory, a line each.

    Args:
        need: the memory of a process that trains the model alone.
        capacity: the bytes that this process can use on the device.
        specs: the strategies that run on the device. Of strategies that shard and offload the same
            parts, only the first is named.
        ranks: the number of available devices.
        micro_batches: the current number of micro-batches in an optimizer step.

    Example:
        >>> gib = 2**30
        >>> need = StepMemory(gib, gib, 2 * gib, 0, 4 * gib)
        >>> what_would_fit(need, 7 * gib, (), ranks=1)
        ['a batch of 1/2 the size with accumulate_grad_batches=2: about 6.00 GiB']
    """
    lines = []
    known = set()
    for spec in specs:
        alike = spec.shards, spec.offloads
        helps = spec.offloads or (spec.shards and ranks > 1)
        if not helps or alike in known:
            continue
        known.add(alike)
        if (held := need.on_device(spec, ranks)) <= capacity:
            where = f" with devices={ranks}" if ranks > 1 else ""
            lines.append(f"strategy={spec.name!r}{where}: about {format_size(held)}")
    fixed = need.parameters + need.gradients + need.optimizer + need.buffers
    for parts in (2, 4, 8, 16, 32, 64):
        if (held := fixed + need.working // parts) <= capacity:
            lines.append(
                f"a batch of 1/{parts} the size with accumulate_grad_batches="
                f"{micro_batches * parts}: about {format_size(held)}"
            )
            break
    return lines
