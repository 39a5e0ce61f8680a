"""Which strategies a model would fit with: an estimate from what one rank held; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratagem.discovery.specs import StrategySpec

GIB = 2**30


@dataclass(frozen=True)
class MemoryNeed:
    """What training a model takes, in bytes.

    Attributes:
        parameters, gradients, optimizer: of the whole model, as one process would hold it alone.
        buffers: the same, which no strategy divides.
        rest: of one rank: activations, inputs, what communication and kernels work with.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    rest: int

    def on_device(self, spec: StrategySpec, ranks: int) -> int:
        """Return what one of so many ranks would hold on its device under a strategy.

        Example:
            >>> from stratagem.discovery import StrategySpec
            >>> spec = StrategySpec(name="zero", target="m:C", api_version=1, shards=("optimizer",))
            >>> MemoryNeed(10, 10, 20, 1, 5).on_device(spec, 4)
            31
        """
        held = self.buffers + self.rest
        for part in ("parameters", "gradients", "optimizer"):
            if part not in spec.offloads:
                held += -(-getattr(self, part) // (ranks if part in spec.shards else 1))
        return held


def what_would_fit(
    need: MemoryNeed,
    capacity: int,
    specs: Iterable[StrategySpec],
    *,
    ranks: int,
    micro_batches: int = 1,
) -> list[str]:
    """Return what would make training fit into the memory of a device, a line each.

    Args:
        need: what it takes.
        capacity: bytes that this process can have on the device.
        specs: the strategies that run on it; those that divide and offload alike are named once.
        ranks: how many devices there would be for it.
        micro_batches: in an optimizer step, as it is now.

    Example:
        >>> need = MemoryNeed(GIB, GIB, 2 * GIB, 0, 4 * GIB)
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
        held = fixed + need.rest // parts
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
