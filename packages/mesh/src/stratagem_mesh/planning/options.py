"""The cost of each mesh, and the choice of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem_mesh.planning.profile import Profile, total
from stratagem_mesh.planning.sizes import Limits, Sizes, all_sizes
from stratagem_mesh.planning.time import Machines, StepTime, step_time

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
    """

    sizes: Sizes
    memory: Mapping[str, float]
    time: StepTime
    usable: int
    is_simulated: bool = False

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
    def can_simulate(self) -> bool:
        """Whether the planner simulates a step; one of a pipeline runs all layers of each stage."""
        return self.sizes.pipeline == 1

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
    return [
        Option(sizes, profile.memory(sizes), step_time(profile, sizes, machines), usable)
        for sizes in all_sizes(machines.devices, machines.num_nodes, limits)
    ]


def choose(options: Sequence[Option]) -> Option:
    """Return the best option: the simplest of the fastest that fit."""
    best = min(options, key=lambda each: each.order)
    if not best.fits:
        return best
    fast = [each for each in options if each.fits and each.cost <= _SLOWER * best.cost]
    return min(fast, key=lambda each: (each.sizes.complexity, each.cost))
