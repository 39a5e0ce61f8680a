"""Which strategies a model would fit with: an estimate from what one rank held; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stratagem.discovery.specs import StrategySpec

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30

USABLE = 0.9
"""The part of a device's memory that a plan fills: allocators keep some, and libraries too."""


@dataclass(frozen=True)
class StepMemory:
    """What a process holds while it takes an optimizer step, in bytes.

    Attributes:
        parameters, gradients, optimizer, buffers: of the model.
        working: the rest: activations, inputs, gathered parameters, what communication and kernels
            work with.
        sent: what it hands to collectives in the step.
        flops: floating-point operations in the step, not bytes.

    Example:
        >>> from stratagem.strategies import StepMemory
        >>> alone = StepMemory(parameters=8, gradients=8, optimizer=16, buffers=0, working=4)
        >>> alone.total, alone.divided(4, ["optimizer"]).total
        (36, 24)
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    working: int
    sent: int = 0
    flops: int = 0

    @property
    def total(self) -> int:
        """What the process holds."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.working

    def divided(self, ranks: int, shards: Collection[str]) -> StepMemory:
        """Return what one of so many ranks holds if they divide these fields."""
        return replace(self, **{part: -(-getattr(self, part) // ranks) for part in shards})

    def on_device(self, spec: StrategySpec, ranks: int) -> int:
        """Return what one of so many ranks holds on its device by what a strategy's spec says."""
        held = self.divided(ranks, spec.shards)
        return replace(held, **dict.fromkeys(spec.offloads, 0)).total


def memory_to_train(module: nn.Module, bytes_per_weight: int | None = None) -> StepMemory:
    """Return what a process holds that trains a model alone, without activations.

    The optimizer is not known yet: two numbers for each weight are counted, as Adam keeps them.

    Args:
        module: the model; parameters that it makes later are not counted.
        bytes_per_weight: of floating-point weights while they are trained; None: as they are.
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
    """Return what would make training fit into the memory of a device, a line each.

    Args:
        need: what a process holds that trains the model alone.
        capacity: bytes that this process can have on the device.
        specs: the strategies that run on it; those that divide and offload alike are named once.
        ranks: how many devices there would be for it.
        micro_batches: in an optimizer step, as it is now.

    Example:
        >>> need = StepMemory(GIB, GIB, 2 * GIB, 0, 4 * GIB)
        >>> what_would_fit(need, 7 * GIB, (), ranks=1)
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
        held = need.on_device(spec, ranks)
        if held <= capacity:
            where = f" with devices={ranks}" if ranks > 1 else ""
            lines.append(f"strategy={spec.name!r}{where}: about {gib(held)}")
    fixed = need.parameters + need.gradients + need.optimizer + need.buffers
    for parts in (2, 4, 8, 16, 32, 64):
        held = fixed + need.working // parts
        if held <= capacity:
            lines.append(
                f"a batch of 1/{parts} the size with accumulate_grad_batches="
                f"{micro_batches * parts}: about {gib(held)}"
            )
            break
    return lines


def gib(size: float) -> str:
    """Return a size as text: in GiB, or where that would be nearly 0, in MiB.

    Example:
        >>> gib(3 * 2**29), gib(3 * 2**19)
        ('1.50 GiB', '1.50 MiB')
    """
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
