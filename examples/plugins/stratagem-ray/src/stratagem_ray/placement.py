"""Placement: room for all ranks of a plan on a Ray cluster, or what is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from stratagem.errors import ConfigurationError

_SAID_AFTER = 5.0
"""Seconds after which a launch that waits for room says what for."""


@dataclass(frozen=True)
class Room:
    """What the ranks of a launch need.

    Attributes:
        num_nodes: how many times `node`.
        node: Ray's resources for the ranks of one node, which are on one machine.
        strategy: how Ray places nodes: "SPREAD" over machines where it can, "STRICT_SPREAD" in any
            case; "PACK" on few machines where it can, "STRICT_PACK" on one.
    """

    num_nodes: int
    node: Mapping[str, float]
    strategy: str

    def missing(self) -> str:
        """Return what the cluster lacks for it now, as a sentence says it."""
        free = ray.available_resources()
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        parts = []
        for name, each in self.node.items():
            wanted = each * self.num_nodes
            if wanted > free.get(name, 0.0):
                total = sum(machine.get(name, 0.0) for machine in machines)
                there = f"{_number(free.get(name, 0.0))} of {_number(total)} are free"
                parts.append(f"{name}: {_number(wanted)} are needed, {there}")
        if self.strategy == "STRICT_SPREAD" and self.num_nodes > len(machines):
            parts.append(f"machines: {self.num_nodes} are needed, there are {len(machines)}")
        return "; ".join(parts) or "no machine has enough of it free at once"

    def __str__(self) -> str:
        """Return it as an error says it."""
        node = ", ".join(f"{name}: {_number(each)}" for name, each in self.node.items())
        return f"{self.num_nodes} node(s) with {node} each ({self.strategy})"


def _number(value: float) -> str:
    return f"{value:.10g}"


@contextmanager
def placed(room: Room, timeout: float) -> Iterator[PlacementGroup]:
    """Wait for room, and hold it until the end of the context; what runs in it ends with it.

    Args:
        room: what is needed; the n-th bundle of the group is that of the n-th node.
        timeout: seconds to wait, since nodes may be on their way or others' work may end.

    Raises:
        ConfigurationError: there is none in that time; says what is missing.
    """
    group = placement_group([dict(room.node)] * room.num_nodes, strategy=room.strategy)
    try:
        _wait(group, room, timeout)
        yield group
    finally:
        remove_placement_group(group)


def _wait(group: Any, room: Room, timeout: float) -> None:
    began, was_said = time.monotonic(), False
    while not group.wait(1.0):  # briefly, so that Ctrl-C comes through
        waited = time.monotonic() - began
        if waited >= timeout:
            raise ConfigurationError(
                f"the Ray cluster has had no room for {room} in {timeout:.0f} s; {room.missing()}. "
                "Add nodes, ask for less (devices, num_nodes, RayLauncher(resources_per_rank=...)) "
                "or wait longer (RayLauncher(timeout=...))"
            )
        if waited >= _SAID_AFTER and not was_said:
            was_said = True
            print(
                f"stratagem: waiting up to {timeout:.0f} s for {room}; {room.missing()}",
                file=sys.stderr,
                flush=True,
            )
