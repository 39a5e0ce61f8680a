"""Memory and communication of a model on any mesh, by formulas from a few simulated steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from stratagem_mesh.pipeline.schedule import actions, most_in_flight
from stratagem_mesh.planning.sizes import Sizes
from stratagem_mesh.planning.stages import Part, Stage

STATE = ("parameters", "gradients", "optimizer")
"""The parts that ranks of a shard divide."""
PARTS = (*STATE, "accumulated", "buffers", "gathered", "communication", "working")
"""The parts of a rank's memory.

"accumulated" are gradients that stay whole until the last of several micro-batches; "gathered" are
parameters of other ranks in the model's own; "communication" is what collectives read and write.
"""

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
    def communication(self) -> int:
        """Bytes of `working` that collectives read and write."""

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
    def of(
        cls,
        sizes: Sizes,
        moments: Mapping[str, Memory],
        excess: float = 1.0,
        *,
        accumulates: bool = False,
    ) -> Probe:
        """Return the probe of the planner's figures.

        Args:
            sizes: the mesh.
            moments: of a step, with the figures of a rank.
            excess: the shards of rank 0, over an equal share.
            accumulates: whether a step has several micro-batches.
        """
        step = moments["step"]
        own = min(memory.parameters for memory in moments.values())
        held = {}
        for name, memory in moments.items():
            gradients = float(min(step.gradients, memory.gradients))
            gathered = memory.parameters - own + memory.gradients - gradients
            working, accumulated = float(memory.working - memory.communication), 0.0
            if accumulates and name != "step":
                accumulated = min(own * sizes.shards / excess, gradients + working)
                working, gradients = working + gradients - accumulated, 0.0
            held[name] = {
                "parameters": own,
                "gradients": gradients,
                "optimizer": memory.optimizer,
                "accumulated": accumulated,
                "buffers": memory.buffers,
                "gathered": gathered,
                "communication": memory.communication,
                "working": working,
            }
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
        divide: returns the stages of a pipeline, by their number.
        converted: bytes of the tensors of a micro-batch that the precision converts. A pipeline
            converts the tensors of all micro-batches at the beginning of a step.
    """

    base: Probe
    along: Mapping[str, Probe] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    micro_batches: int = 1
    shapes: Shapes = field(default_factory=lambda: Shapes(()))
    divide: Callable[[int], Sequence[Stage]] = lambda count: ()
    converted: int = 0

    def __post_init__(self) -> None:
        moments = Moments(self.base.moments, [part.name for part in self.parts])
        cached = lru_cache(None)(lambda count: tuple(self.divide(count)))
        object.__setattr__(self, "stages", cached)
        object.__setattr__(self, "moments", moments)

    stages: Any = field(init=False, repr=False, compare=False)
    moments: Any = field(init=False, repr=False, compare=False)

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
        alone = self._of_forward(self.base)
        few = {
            axis: whole * min(1.0, self._of_forward(probe) / alone)
            for axis, probe in self.along.items()
        }
        return self._scaled(sizes, whole, few)

    @staticmethod
    def _of_forward(probe: Probe) -> float:
        forward = [held for name, held in probe.moments.items() if name.startswith("forward")]
        return max(1.0, *(held["working"] for held in forward))

    def memory(self, sizes: Sizes, schedule: str = "1f1b") -> dict[str, float]:
        """Return the bytes of the rank that holds most, by part, in the moment when it does.

        Args:
            sizes: the mesh.
            schedule: "1f1b" or "gpipe".
        """
        moments = self.held(sizes)
        kept = self.kept(sizes)
        if sizes.pipeline == 1:
            return _named(max(moments.values(), key=total), kept)
        stages = self.stages(sizes.pipeline)
        orders = actions(schedule, sizes.pipeline, 1, self.micro_batches)
        found = [
            self._of_stage(stage, most_in_flight(order), sizes, moments)
            for stage, order in zip(stages, orders, strict=True)
        ]
        return max(found, key=total)

    def _of_stage(
        self, stage: Stage, in_flight: int, sizes: Sizes, moments: Mapping[str, Held]
    ) -> dict[str, float]:
        """Return the bytes of a stage by part, in the moment when it holds most.

        While a part of a stage runs, the stage has as much as the whole model at that moment,
        without the activations of earlier stages, and in addition its other micro-batches in
        flight. Each part of a stage is gathered by itself, until its backward pass. A stage with a
        single rank gathers nothing.

        Args:
            stage: the stage.
            in_flight: the number of micro-batches that it holds at the most.
            sizes: the mesh.
            moments: of the whole model, with one micro-batch in flight.
        """
        parameters = self.parameters(sizes)
        kept = [float(part.activations) for part in self.parts]
        scale = self.kept(sizes) / (sum(kept) or 1.0)
        before = scale * sum(kept[: stage.parts.start])
        own = scale * sum(kept[stage.parts.start : stage.parts.stop])
        received = stage.received / sizes.context
        shards = sizes.shards / self.shapes.excess(sizes)
        share = stage.sharded + stage.whole * shards
        inputs = (self.micro_batches - 1) * self.converted  # the model's own step has one
        step, gathered = moments["step"], parameters * (sizes.world > sizes.pipeline)
        state = {part: step[part] * share for part in STATE}
        found = [
            {
                **step,
                **state,
                "communication": step["communication"] * share,
                "working": step["working"] * share,
            }
        ]
        for moment, is_among in self.moments.of(stage.parts, moments):
            working = max(0.0, moment["working"] - (before if is_among else scale * sum(kept)))
            found.append(
                {
                    **moment,
                    **{part: moment[part] * share for part in STATE},
                    "accumulated": moment["accumulated"] * stage.parameters,
                    "gathered": gathered * stage.sharded,
                    "communication": gathered * stage.largest,
                    "working": working
                    + inputs
                    + (in_flight - is_among) * own
                    + in_flight * received,
                }
            )
        return _named(max(found, key=total), in_flight * (own + received))


class Moments:
    """The moments of a simulated step, by the part of the model that runs.

    The planner names them "forward|layers 0", by the element of a list and its number, which may
    count from the end; "forward|layers done" follows the last one. "backward" comes before the
    first of them.

    Args:
        names: of the moments.
        parts: the names of the parts, in the order of calls.

    Example:
        >>> moments = Moments(["forward|b 0", "forward|b -1", "step"], ["a", "b.0", "b.1", "c", ""])
        >>> held = {"forward|b 0": {"working": 2.0}, "forward|b -1": {"working": 4.0}}
        >>> list(moments.of(range(2, 5), held))
        [({'working': 4.0}, True)]
    """

    def __init__(self, names: Iterable[str], parts: Sequence[str]) -> None:
        self._at: list[tuple[str, int]] = []
        """Moments of which the part is known."""
        self._layers: dict[tuple[str, str], dict[int, str]] = {}
        """Moments of lists, by phase and list, by the number of the part."""
        self._anywhere: list[str] = []
        of_lists: dict[str, list[int]] = {}
        for number, part in enumerate(parts):
            of_lists.setdefault(part.rpartition(".")[0], []).append(number)
        plain = []
        for name in names:
            phase, _, at = name.partition("|")
            if phase not in ("forward", "backward"):
                continue
            stack, _, which = at.rpartition(" ")
            numbers = of_lists.get(stack, [])
            if not at:
                plain.append(name)
            elif which == "done" and numbers:
                after = numbers[-1] + 1 if phase == "forward" else numbers[0] - 1
                self._at.append((name, min(max(0, after), len(parts) - 1)))
            elif which != "done" and -len(numbers) <= int(which) < len(numbers):
                self._layers.setdefault((phase, stack), {})[numbers[int(which)]] = name
        for name in plain:
            if self._layers:
                self._at.append((name, 0 if name == "forward" else len(parts) - 1))
            else:
                self._anywhere.append(name)

    def of(self, parts: range, held: Mapping[str, Held]) -> Iterator[tuple[Held, bool]]:
        """Yield the memory of a rank with the whole model while some parts run.

        Layers between those that were simulated lie between them.

        Args:
            parts: the numbers of the parts.
            held: the bytes in each moment.

        Yields:
            The bytes by part, and whether only parts up to these hold activations.
        """
        for name in self._anywhere:
            yield held[name], False
        for name, number in self._at:
            if number in parts:
                yield held[name], True
        for known in self._layers.values():
            numbers = sorted(known)
            first, last = max(parts.start, numbers[0]), min(parts.stop - 1, numbers[-1])
            for number in sorted({first, last}) if first <= last else ():
                low = max(each for each in numbers if each <= number)
                high = min(each for each in numbers if each >= number)
                share = (number - low) / (high - low) if high > low else 0.0
                before, after = held[known[low]], held[known[high]]
                between = {
                    part: size + share * (after[part] - size) for part, size in before.items()
                }
                yield between, True


def _named(parts: Held, kept: float) -> dict[str, float]:
    """Return the parts by the planner's names."""
    found = {part: parts[part] for part in (*STATE, "buffers")}
    found["gradients"] += parts["accumulated"]
    activations = min(kept, parts["working"])
    found["activations"] = activations
    return {
        **found,
        "communication": parts["gathered"] + parts["communication"],
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
