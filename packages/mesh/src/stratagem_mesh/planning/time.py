"""The time of a step on a mesh, from figures of devices and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stratagem_mesh.pipeline.schedule import bubble
from stratagem_mesh.planning.profile import Profile
from stratagem_mesh.planning.sizes import Sizes

_HOP = 3.4e-6
"""Seconds of a step of a ring within a node: NCCL's `hwLat` of NVLink, ring, simple protocol.

NVIDIA/nccl, src/graph/tuning.cc.
"""
_HOP_BETWEEN = 14e-6
"""The same between nodes: NCCL's `hwLat` of the network."""


class Links(Protocol):
    """A device, with its links to others; see `Device` of the planner."""

    def between(self, ranks: int, nodes: int) -> float:
        """Return the bytes per second of a rank in a ring over ranks of each of some nodes."""


@dataclass(frozen=True)
class Machines:
    """The devices of a plan.

    Attributes:
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        links: the links of a device.
        operations: floating-point operations per second that a model reaches on a device.
    """

    devices: int
    num_nodes: int
    links: Links
    operations: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step of a rank.

    Attributes:
        compute: forward and backward, with activations that are computed again.
        sharding: gathering parameters, reducing gradients; at the same time as computation.
        replicate: all-reduces of gradients between copies; at the same time as computation.
        tensor, context, expert: collectives that computation waits for.
        pipeline: waiting for other stages, and transfers between them.
    """

    compute: float
    sharding: float = 0.0
    replicate: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0

    @property
    def total(self) -> float:
        """The time of the step.

        FSDP2 gathers and reduces beside computation, so the longer of both counts. The collectives
        of activations stand between two operations of a block.
        """
        beside = max(self.compute, self.sharding + self.replicate)
        return beside + self.tensor + self.context + self.expert + self.pipeline


def ring(size: float, place: tuple[int, int, int], links: Links, calls: float) -> float:
    """Return the seconds of collectives.

    Each takes size * (n - 1) / n / bandwidth, if an all-reduce counts twice (NVIDIA/nccl-tests,
    doc/PERFORMANCE.md), and a delay for each of the n - 1 steps of a ring.

    Args:
        size: bytes of the tensors that a rank hands over, whole; of all-reduces twice.
        place: the numbers of ranks, of ranks on a node, and of nodes.
        links: of a device.
        calls: the number of collectives.
    """
    ranks, on_node, nodes = place
    if ranks == 1:
        return 0.0
    delay = calls * ((ranks - nodes) * _HOP + (nodes - 1) * _HOP_BETWEEN)
    return size * (ranks - 1) / ranks / links.between(on_node, nodes) + delay


def step_time(
    profile: Profile, sizes: Sizes, machines: Machines, virtual_stages: int = 1
) -> StepTime:
    """Return the time of a step of all micro-batches.

    - Computation: operations / (peak * efficiency).
    - `shard`, `context`: parameters gathered in forward and in backward, gradients reduced.
    - `replicate`: an all-reduce of the gradients of a shard.
    - `tensor`: four all-reduces of activations in each block; `context` and `expert`: all-to-alls.
    - `pipeline`: the slowest stage takes its share of all these, and waits (P - 1) / (V * M) of the
      time. Boundaries are sent twice, outputs and their gradients.

    Args:
        profile: the model.
        sizes: the mesh.
        machines: the devices.
        virtual_stages: the number of stages on each rank of a pipeline.
    """
    links, devices = machines.links, machines.devices
    layers = max(1, len(profile.parts))
    calls = layers * profile.micro_batches

    def along(axis: str, size: float, count: float) -> float:
        return ring(size, sizes.place(axis, devices), links, count)

    share, transfers = 1.0, 0.0
    micro_batches = profile.micro_batches
    if sizes.pipeline > 1:
        stages = profile.stages(sizes.pipeline)
        share = max(stage.flops for stage in stages)
        parts = max(stage.sharded for stage in stages)
        size = max(stage.output for stage in stages[:-1]) / sizes.context
        between = links.between(1, 1 if devices % (sizes.world // sizes.pipeline * 2) == 0 else 2)
        passes = micro_batches + sizes.pipeline - 1
        transfers = 2 * passes * (size / between + _HOP_BETWEEN) * virtual_stages
    else:
        parts = 1.0
    gathered = profile.gathered(sizes) * parts
    gradients = profile.parameters(sizes) * parts
    alone = StepTime(
        compute=profile.flops(sizes) * share / machines.operations,
        sharding=along("shards", gathered, 3 * calls * parts),
        replicate=along("replicate", 2 * gradients / sizes.shards, layers * parts),
        **{
            axis: along(axis, profile.exchanged(axis, sizes) * share, 4 * calls * share)
            for axis in ("tensor", "context", "expert")
        },
    )
    if sizes.pipeline == 1:
        return alone
    waits = alone.total * bubble(sizes.pipeline, micro_batches, virtual_stages)
    return StepTime(
        alone.compute,
        alone.sharding,
        alone.replicate,
        alone.tensor,
        alone.context,
        alone.expert,
        waits + transfers,
    )
