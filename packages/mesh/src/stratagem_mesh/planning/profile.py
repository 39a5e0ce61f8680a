"""Memory and communication of a model on any mesh, by formulas from a few simulated steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from stratagem_mesh.planning.sizes import Sizes
from stratagem_mesh.planning.stages import Part, Stage, cut, in_flight

STATE = ("parameters", "gradients", "optimizer")
"""The parts that ranks of a shard divide."""
PARTS = (*STATE, "buffers", "gathered", "working")
"""The parts of a rank's memory: "gathered" are parameters of other ranks in the model's own."""

Held = Mapping[str, float]
"""Bytes of a rank by part."""


class Memory(Protocol):
    """The memory of a rank in a moment of a step; see `PlannedMemory` of the planner."""

    @property
    def parameters(self) -> int:
        """Bytes of parameters, gathered ones among them."""

    @property
    def gradients(self) -> int:
        """Bytes of gradients."""

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state."""

    @property
    def buffers(self) -> int:
        """Bytes of buffers."""

    @property
    def working(self) -> int:
        """Bytes of all else."""

    @property
    def sent(self) -> int:
        """Bytes that the rank hands to collectives in a step, all-reduces twice."""

    @property
    def flops(self) -> int:
        """Operations of the rank in a step."""


@dataclass(frozen=True)
class Probe:
    """A simulated step.

    Attributes:
        sizes: the mesh.
        moments: the memory of the rank in each moment, by part; "step" is the optimizer's.
        sent, flops: of a step.
        excess: the shards of rank 0, over an equal share.
    """

    sizes: Sizes
    moments: Mapping[str, Held]
    sent: float
    flops: float
    excess: float = 1.0

    @classmethod
    def of(cls, sizes: Sizes, moments: Mapping[str, Memory], excess: float = 1.0) -> Probe:
        """Return the probe of the planner's figures."""
        own = min(memory.parameters for memory in moments.values())
        gradients = moments["step"].gradients
        held = {
            name: {
                "parameters": own,
                "gradients": min(gradients, memory.gradients),
                "optimizer": memory.optimizer,
                "buffers": memory.buffers,
                "gathered": memory.parameters - own + max(0, memory.gradients - gradients),
                "working": memory.working,
            }
            for name, memory in moments.items()
        }
        step = moments["step"]
        return cls(sizes, held, step.sent, step.flops, excess)

    def whole(self, moment: str, part: str) -> float:
        """Return the bytes of all shards of a part; other parts stay."""
        shards = self.sizes.shards / self.excess if _is_sharded(moment, part) else 1
        return self.moments[moment][part] * shards

    @property
    def parameters(self) -> float:
        """Bytes of the parameters that ranks of a shard gather."""
        return self.whole("step", "parameters")

    @property
    def state(self) -> float:
        """Bytes of parameters, gradients and the optimizer's state in all shards."""
        return sum(self.whole("step", part) for part in STATE)


@dataclass(frozen=True)
class Shape:
    """A parameter: its bytes, its first dimension, and whether it belongs to experts."""

    size: int
    rows: int
    is_expert: bool = False


class Shapes:
    """The parameters of a model, as FSDP2 divides them: by their first dimension.

    Args:
        shapes: of the parameters.

    Example:
        >>> shapes = Shapes([Shape(800, 8, is_expert=True)])
        >>> shapes.excess(Sizes(shard=16)), shapes.excess(Sizes(shard=16, expert=8))
        (2.0, 1.0)
    """

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self.shapes: Counter[tuple[int, bool]] = Counter()
        for each in shapes:
            self.shapes[each.rows, each.is_expert] += each.size
        self.whole = sum(self.shapes.values())
        experts = sum(size for (_, is_expert), size in self.shapes.items() if is_expert)
        self.expert_share = experts / self.whole if self.whole else 0.0

    def excess(self, sizes: Sizes) -> float:
        """Return the share of rank 0 in the shards, over an equal share.

        Eight experts over 16 ranks take as much as over 8. Ranks that have the same experts shard
        them along another dimension.
        """
        held = sum(
            size / sizes.shards
            if is_expert and sizes.expert > 1
            else size * -(-rows // sizes.shards) / rows
            for (rows, is_expert), size in self.shapes.items()
        )
        return held * sizes.shards / self.whole if self.whole else 1.0


@dataclass(frozen=True)
class Profile:
    """A model, as a plan needs it.

    Attributes:
        base: a step in which all ranks shard the parameters, and divide nothing else.
        along: a step with a few ranks along an axis, by axis: "tensor", "context", "expert".
        parts: the parts of the model.
        micro_batches: of a step.
        shapes: of the parameters.
    """

    base: Probe
    along: Mapping[str, Probe] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    micro_batches: int = 1
    shapes: Shapes = field(default_factory=lambda: Shapes(()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", lru_cache(None)(lambda count: cut(self.parts, count)))

    stages: Any = field(init=False, repr=False, compare=False)

    # -- figures of a rank without a pipeline

    def held(self, sizes: Sizes) -> dict[str, dict[str, float]]:
        """Return the bytes of a rank in each moment, by part; `pipeline` counts as 1.

        State is divided by the ranks of `shard` and `context`. Along the other axes a part consists
        of what each rank holds, and of what they divide: whole + divided / size. Both follow from
        the steps with one rank and with a few ranks.
        """
        return {
            moment: {
                part: self._scaled(sizes, *self._pairs(moment, part))
                * (self.shapes.excess(sizes) / sizes.shards if _is_sharded(moment, part) else 1)
                for part in PARTS
            }
            for moment in self.base.moments
        }

    def flops(self, sizes: Sizes) -> float:
        """Return the operations of a rank in a step; `pipeline` counts as 1."""
        return self._figure(sizes, "flops")

    def parameters(self, sizes: Sizes) -> float:
        """Return the bytes of the parameters of all shards, on a rank of the tensor axis."""
        return self._figure(sizes, "parameters")

    def gathered(self, sizes: Sizes) -> float:
        """Return the bytes that ranks of a shard gather and reduce in a step, whole.

        FSDP2 gathers parameters in forward and backward, and reduces gradients, each once: three
        times the parameters. Experts are gathered by the ranks that have the same ones.
        """
        sent = self.base.sent * self.parameters(sizes) / max(1.0, self.base.parameters)
        share = self.shapes.expert_share
        excess = self.shapes.excess(sizes) / self.base.excess
        return sent * excess * (1 - share + share / sizes.expert)

    def exchanged(self, axis: str, sizes: Sizes) -> float:
        """Return the bytes that a rank hands to the collectives of an axis in a step.

        - `tensor`: all-reduces of activations, two in the forward pass of a block and two in its
          backward pass, whose tensors are whole on each rank (Megatron-LM, arXiv:1909.08053).
        - `context`: all-to-alls around attention, of the rank's part of a sequence (DeepSpeed
          Ulysses, arXiv:2309.14509).
        - `expert`: all-to-alls of the rank's tokens, to the experts and back (GShard,
          arXiv:2006.16668).
        """
        if sizes[axis] == 1 or axis not in self.along:
            return 0.0
        probe = self.along[axis]
        sent = max(0.0, probe.sent - self.gathered(probe.sizes))
        heads = sizes.tensor if axis == "context" else 1
        return sent * probe.sizes.context / (sizes.context * heads)

    def _figure(self, sizes: Sizes, name: str) -> float:
        few = {axis: getattr(probe, name) for axis, probe in self.along.items()}
        return self._scaled(sizes, getattr(self.base, name), few)

    def _pairs(self, moment: str, part: str) -> tuple[float, dict[str, float]]:
        few = {axis: probe.whole(moment, part) for axis, probe in self.along.items()}
        return self.base.whole(moment, part), few

    def _scaled(self, sizes: Sizes, one: float, few: Mapping[str, float]) -> float:
        """Return a figure on other sizes.

        Args:
            sizes: the mesh.
            one: the figure with one rank along each axis.
            few: the figure with the ranks of `along`, by axis.
        """
        values = [
            along(one, value, self.along[axis].sizes[axis], sizes[axis])
            for axis, value in few.items()
            if sizes[axis] > 1
        ]
        if one <= 0:
            return max(values, default=0.0)
        result = one
        for value in values:
            result *= value / one
        return result

    # -- memory

    def kept(self, sizes: Sizes) -> float:
        """Return the bytes that a micro-batch keeps from forward to backward, of all layers.

        They are the operations of one process, divided as the memory of a forward pass is.
        """
        whole = float(sum(part.activations for part in self.parts))
        alone = self._without_gradients(self.base)
        few = {
            axis: whole * min(1.0, self._without_gradients(probe) / alone)
            for axis, probe in self.along.items()
        }
        return self._scaled(sizes, whole, few)

    def accumulated(self, sizes: Sizes) -> float:
        """Return the bytes of the gradients that a rank holds whole between micro-batches."""
        return self.parameters(sizes) if self.micro_batches > 1 else 0.0

    def _without_gradients(self, probe: Probe) -> float:
        whole = probe.parameters if self.micro_batches > 1 else 0.0
        forward = [held for name, held in probe.moments.items() if name.startswith("forward")]
        return max(1.0, max(held["working"] for held in forward) - whole)

    def memory(self, sizes: Sizes, schedule: str = "1f1b") -> dict[str, float]:
        """Return the bytes of the rank that holds most, by part, in the moment when it does.

        A stage of a pipeline holds its share of the state, and the activations of its micro-batches
        in flight. In backward the oldest of them is partly freed.

        Args:
            sizes: the mesh.
            schedule: "1f1b" or "gpipe".
        """
        moments = self.held(sizes)
        kept, gradients = self.kept(sizes), self.accumulated(sizes)
        if sizes.pipeline == 1:
            return _named(max(moments.values(), key=total), kept)
        found = []
        for number, stage in enumerate(self.stages(sizes.pipeline)):
            count = in_flight(schedule, sizes.pipeline, number, self.micro_batches)
            found += [
                (_of_stage(moment, parts, stage, count * kept, kept, gradients), stage)
                for moment, parts in moments.items()
            ]
        most, stage = max(found, key=lambda each: total(each[0]))
        return _named(most, self.micro_batches * stage.activations * kept)


def _of_stage(
    moment: str, parts: Held, stage: Stage, held: float, kept: float, gradients: float
) -> dict[str, float]:
    """Return the bytes of a stage.

    Args:
        moment: of the step.
        parts: of the whole model in this moment, with one micro-batch.
        stage: the shares.
        held: the activations in flight, of the whole model.
        kept: the activations of a micro-batch.
        gradients: bytes of gradients that are held whole.
    """
    found = dict(parts)
    for part in STATE:
        found[part] *= stage.parameters
    if moment == "step":
        found["working"] *= stage.parameters
        return found
    # The peak of the whole model has the gradients, and the activations of one micro-batch.
    rest = max(0.0, parts["working"] - gradients - kept)
    found["working"] = rest + gradients * stage.parameters + held * stage.activations
    return found


def _named(parts: Held, kept: float) -> dict[str, float]:
    """Return the parts by the planner's names."""
    found = {part: parts[part] for part in (*STATE, "buffers")}
    activations = min(kept, parts["working"])
    found["activations"] = activations
    return {
        **found,
        "communication": parts["gathered"],
        "temporary": parts["working"] - activations,
    }


def total(parts: Held) -> float:
    """Return the sum of the parts."""
    return sum(parts.values())


def most_held(moments: Mapping[str, Memory]) -> dict[str, float]:
    """Return the bytes of a rank by part, in the moment of a simulated step when it holds most."""
    parts = (*STATE, "buffers", "working")
    held = [{part: getattr(memory, part) for part in parts} for memory in moments.values()]
    return max(held, key=total)


def along(one: float, few: float, ranks: int, size: int) -> float:
    """Return whole + divided / size, from the values with one rank and with a few ranks.

    Args:
        one: the value with one rank.
        few: the value with `ranks`.
        ranks: at least 2.
        size: the number of ranks of the result.

    Example:
        >>> along(10.0, 6.0, 2, 4)
        4.0
    """
    divided = min(one, (one - few) / (1 - 1 / ranks))
    return one - divided + divided / size


def _is_sharded(moment: str, part: str) -> bool:
    """Whether ranks of a shard divide a part; an optimizer steps its shard."""
    return part in STATE or (moment == "step" and part == "working")
