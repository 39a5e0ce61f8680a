"""The stages of a pipeline in a plan: the share of each in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from stratagem_mesh.pipeline.cuts import Measured, blocks_of, costs_of, divided_by


class Part(Protocol):
    """A part of a model, in the order of calls; see `ModuleMemory` of the planner."""

    @property
    def name(self) -> str:
        """The name of the module; "": the rest of the model, the batch and the loss."""

    @property
    def parameters(self) -> int:
        """Bytes of its parameters."""

    @property
    def activations(self) -> int:
        """Bytes that its forward keeps until backward."""

    @property
    def flops(self) -> int:
        """Operations of its forward."""

    @property
    def output(self) -> int:
        """Bytes that its forward returns."""


@dataclass(frozen=True)
class Stage:
    """A stage of a model.

    Attributes:
        parts: the numbers of its parts.
        blocks: the number of blocks among them, such as layers of a decoder.
        sharded: the parameters that it shards, as a share of the model's.
        whole: the parameters that other stages hold too, such as tied weights; each rank keeps
            them whole.
        largest: the largest part's parameters, as a share.
        flops: its operations, as a share.
        received: bytes of a micro-batch that it receives from the stage before.
        output: bytes that it sends to the next one.
    """

    parts: range
    blocks: int
    sharded: float
    whole: float
    largest: float
    flops: float
    received: int = 0
    output: int = 0

    @property
    def parameters(self) -> float:
        """All parameters of the stage, as a share of the model's."""
        return self.sharded + self.whole


def blocks_among(model: nn.Module, parts: Sequence[Part]) -> int:
    """Return the number of blocks of a model, at which stages begin.

    Args:
        model: the model.
        parts: its parts.
    """
    return len(blocks_of(model, _units(model, parts)))


def stages_of(
    model: nn.Module, parts: Sequence[Part], count: int, measured: Measured | None = None
) -> list[Stage]:
    """Return the stages into which a pipeline divides a model.

    The rest of the model, such as the loss, belongs to the last stage; modules before the first
    block, such as an embedding, belong to the first.

    Args:
        model: the model, without values.
        parts: its parts in the order of calls; at least as many with parameters as stages.
        count: the number of stages.
        measured: the units with the costs of training; None: the parts and their operations.

    Example:
        >>> from types import SimpleNamespace as Row
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        >>> parts = [Row(name=str(n), parameters=80, activations=1, flops=1, output=8)
        ...          for n in range(4)]
        >>> [(stage.parts, stage.flops) for stage in stages_of(model, parts, 2)]
        [(range(0, 2), 0.5), (range(2, 4), 0.5)]
    """
    order = _units(model, parts)
    rows = {part.name: part for part in parts}
    weights = {
        name: float(sum(p.numel() for p in model.get_submodule(name).parameters()))
        for name in order
    }
    if measured is None:
        outputs = dict(zip(order[1:], (rows[name].output for name in order), strict=False))
        costs = costs_of({name: rows[name].flops for name in order}, weights)
        measured = Measured(order, costs, outputs)
    divided = divided_by(model, count, measured)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(sizes.values()) or 1
    sharded, kept = [0] * count, [0] * count
    for name, size in sizes.items():
        holders = divided.parameters[name]
        for stage in holders:
            (sharded if len(holders) == 1 else kept)[stage] += size
    names = [part.name for part in parts]
    starts = [0, *map(names.index, divided.cuts), len(parts)]
    blocks = blocks_of(model, order)
    flops = sum(part.flops for part in parts)
    found: list[Stage] = []
    for number in range(count):
        own = range(starts[number], starts[number + 1])
        members = [parts[index] for index in own]
        found.append(
            Stage(
                own,
                sum(part.name in blocks for part in members),
                sharded[number] / whole,
                kept[number] / whole,
                max(weights.get(part.name, 0.0) for part in members) / whole,
                sum(part.flops for part in members) / flops if flops else 1 / count,
                found[-1].output if found else 0,
                next((part.output for part in reversed(members) if part.name in weights), 0),
            )
        )
    return found


def _units(model: nn.Module, parts: Sequence[Part]) -> list[str]:
    """Return the names of the parts with parameters."""
    names = (part.name for part in parts if part.name)
    return [name for name in names if any(True for _ in model.get_submodule(name).parameters())]
