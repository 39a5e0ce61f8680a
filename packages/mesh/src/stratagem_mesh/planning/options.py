"""The cost of each mesh, and the choice of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem_mesh.planning.profile import Profile, total
from stratagem_mesh.planning.sizes import Limits, Sizes, all_sizes
from stratagem_mesh.planning.time import Machines, StepTime, step_time

_MOST_STEPS = 128
"""Blocks times micro-batches of a simulated pipeline, which runs them all: a few seconds."""
_SLOWER = 1.02
"""A simpler mesh is preferred up to this share of the fastest one's time."""


@dataclass(frozen=True)
class Option:
    """Sizes, with their cost.

    Attributes:
        sizes: the mesh.
        memory: bytes of a rank by part.
        time: of a step.
        usable: bytes of a device that a plan fills.
        is_simulated: whether a simulated step measured the memory; else formulas say it.
        can_simulate: whether the planner simulates a step. Of a pipeline it runs all blocks and
            micro-batches, which takes long if these are many.
    """

    sizes: Sizes
    memory: Mapping[str, float]
    time: StepTime
    usable: int
    is_simulated: bool = False
    can_simulate: bool = True

    @property
    def bytes(self) -> float:
        """The bytes of a rank."""
        return total(self.memory)

    @property
    def fits(self) -> bool:
        """Whether a rank may hold it."""
        return self.bytes <= self.usable

    @property
    def cost(self) -> float:
        """Seconds of all ranks that read a batch."""
        return self.time.total * self.sizes.ranks_of_batch

    @property
    def order(self) -> tuple[bool, float, tuple[int, int]]:
        """A key that sorts the best first: the fastest, or the smallest if none fits."""
        return (not self.fits, self.cost if self.fits else self.bytes, self.sizes.complexity)


def options_of(profile: Profile, limits: Limits, machines: Machines, usable: int) -> list[Option]:
    """Return the options of a model on machines, by formulas.

    Args:
        profile, limits: the model.
        machines: the devices.
        usable: bytes of a device that a plan fills.
    """
    found = []
    for sizes in all_sizes(machines.devices, machines.num_nodes, limits):
        found.append(
            Option(
                sizes,
                profile.memory(sizes),
                step_time(profile, sizes, machines),
                usable,
                can_simulate=sizes.pipeline == 1 or _steps(profile, sizes) <= _MOST_STEPS,
            )
        )
    return found


def _steps(profile: Profile, sizes: Sizes) -> int:
    """Return the number of blocks that all stages run, for all micro-batches."""
    blocks: int = sum(each.blocks for each in profile.stages(sizes.pipeline))
    return profile.micro_batches * blocks


def choose(options: Sequence[Option]) -> Option:
    """Return the best option: the simplest of the fastest that fit."""
    best = min(options, key=lambda each: each.order)
    if not best.fits:
        return best
    fast = [each for each in options if each.fits and each.cost <= _SLOWER * best.cost]
    return min(fast, key=lambda each: (each.sizes.complexity, each.cost))
