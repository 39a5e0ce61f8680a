"""Why a mesh has its sizes, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stratagem.errors import format_size
from stratagem_mesh.planning.options import Option, choose, options_of
from stratagem_mesh.planning.profile import Profile
from stratagem_mesh.planning.sizes import AXES, Limits
from stratagem_mesh.planning.time import Machines

_MOST_DEVICES = 1024
_WHAT = {
    "replicate": "copies of the parameters, each gathered among fewer ranks",
    "context": "ranks compute parts of a sequence",
    "tensor": "ranks of a node compute parts of each layer",
    "expert": "ranks hold different experts",
}
_WAITS = {
    "pipeline": "the pipeline's bubble",
    "tensor": "all-reduces of activations",
    "context": "exchanges of sequences",
    "expert": "exchanges of tokens",
}
"""The parts of a step's time in which computation waits."""


class Reasons:
    """Compares each option with the others.

    Args:
        options: all sizes that suit the machines and the model.
        profile, limits: the model.
        machines: the devices.
    """

    def __init__(
        self, options: Sequence[Option], profile: Profile, limits: Limits, machines: Machines
    ) -> None:
        self.options, self.profile, self.limits, self.machines = options, profile, limits, machines
        self.best = choose(options)

    def of(self, option: Option) -> Iterator[str]:
        """Yield a sentence for each axis: why it has its size."""
        for axis in AXES:
            if axis == "shard":
                yield self._of_shard(option)
            elif option.sizes[axis] > 1:
                without = (each for each in self.options if each.sizes[axis] == 1)
                said = self._compared(option, without)
                yield (
                    f"{axis} {option.sizes[axis]}: {self._what(axis, option)}; without it {said}"
                    f"{self._larger(axis, option)}"
                )
            elif self.limits.refused.get(axis):
                yield f"no {axis}: {self.limits.refused[axis].partition(': ')[0]}"
            elif others := [each for each in self.options if each.sizes[axis] > 1]:
                yield f"no {axis}: with it {self._compared(option, others)}"
        if not option.can_simulate:
            yield (
                "the memory follows from formulas: a pipeline is simulated with all of its layers "
                "and micro-batches, which takes long here"
            )
        if not self.best.fits and not option.fits:
            yield self._machines_needed(option.usable)

    def _of_shard(self, option: Option) -> str:
        sizes = option.sizes
        divided = sizes.shards * sizes.tensor * sizes.pipeline
        return (
            f"shard {sizes.shard}: parameters, gradients and the optimizer's state of "
            f"{format_size(round(self.profile.base.state))} divide between {divided} ranks; a rank "
            f"holds {format_size(round(option.bytes))} of the {format_size(option.usable)} that it "
            "may fill"
        )

    def _what(self, axis: str, option: Option) -> str:
        heads, experts = self.limits.heads, self.limits.experts
        if axis == "tensor" and heads:
            return f"ranks of a node compute {heads // option.sizes.tensor} of {heads} heads"
        if axis == "pipeline":
            return self._of_pipeline(option)
        if axis == "expert":
            return f"ranks hold {experts // option.sizes.expert} of {experts} experts"
        return _WHAT[axis]

    def _larger(self, axis: str, option: Option) -> str:
        """Return how the best of larger sizes compares with an option; "": there are none."""
        larger = [each for each in self.options if each.sizes[axis] > option.sizes[axis]]
        return f"; of a larger size {self._compared(option, larger)}" if larger else ""

    def _of_pipeline(self, option: Option) -> str:
        stages = self.profile.stages(option.sizes.pipeline)
        fewest, most = (bound(stage.blocks for stage in stages) for bound in (min, max))
        blocks = f"{most}" if fewest == most else f"{fewest} to {most}"
        batches = self.profile.micro_batches
        share = option.time.pipeline / option.time.total
        return (
            f"a rank has {blocks} of {sum(each.blocks for each in stages)} blocks, and waits "
            f"{share:.0%} of a step of {batches} micro-batches"
        )

    def _compared(self, option: Option, others: Iterable[Option]) -> str:
        """Return how the best of other options compares with an option."""
        found = list(others)
        if not found:
            return "no sizes divide the devices"
        best = min(found, key=lambda each: each.order)
        if not best.fits:
            return f"the least is {format_size(round(best.bytes))} on a rank ({best.sizes})"
        if not option.fits:
            return f"{best.sizes} fits"
        more = best.cost / option.cost - 1
        if abs(more) < 0.005:
            return f"a batch takes the same time ({best.sizes})"
        if more < 0:
            why = ", too little for larger sizes" if option is self.best else ""
            return f"a batch takes {-more:.1%} less time{why} ({best.sizes})"
        return f"a batch takes {more:.1%} longer at best ({best.sizes}{_waiting(best, option)})"

    def _machines_needed(self, usable: int) -> str:
        """Return how many nodes of these devices the model needs."""
        devices, nodes = self.machines.devices, 2 * self.machines.num_nodes
        while nodes * devices <= _MOST_DEVICES:
            more = Machines(devices, nodes, self.machines.links, self.machines.operations)
            best = choose(options_of(self.profile, self.limits, more, usable))
            if best.fits:
                held = format_size(round(best.bytes))
                return f"{nodes} nodes are enough: {best.sizes} holds {held} on a rank"
            nodes *= 2
        return f"{_MOST_DEVICES} of these devices are not enough for these micro-batches"


def _waiting(longer: Option, option: Option) -> str:
    """Return the share of the wait that is longest compared with an option; "": none is longer."""

    def more(axis: str) -> float:
        now, before = (getattr(each.time, axis) for each in (longer, option))
        return float(now * longer.sizes.ranks_of_batch - before * option.sizes.ranks_of_batch)

    axis = max(_WAITS, key=more)
    if more(axis) <= 0:
        return ""
    return f", {getattr(longer.time, axis) / longer.time.total:.0%} of it in {_WAITS[axis]}"
