"""Which sizes a plan proposes, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.expert.modules import find_experts
from stratagem_mesh.pipeline.cuts import Measured, check_stages, measure as measure_units
from stratagem_mesh.planning.options import Option, choose, options_of
from stratagem_mesh.planning.profile import Memory, Probe, Profile, Shape, Shapes, most_held
from stratagem_mesh.planning.reasons import Reasons
from stratagem_mesh.planning.sizes import AXES, Limits, Sizes, all_sizes, limits_of
from stratagem_mesh.planning.stages import Part, blocks_among, stages_of
from stratagem_mesh.planning.time import Links, Machines, step_time

_MOST = 6
"""The number of proposals."""
_MOST_ROUNDS = 4
"""How often proposals are simulated, each time with others in place of the worst."""


class Job(Protocol):
    """The model and the machines for which a strategy proposes sizes."""

    devices: int
    num_nodes: int
    usable: int
    """Bytes of a device that a plan fills."""
    links: Links
    operations: float
    """Floating-point operations per second that a model reaches on a device."""
    micro_batches: int
    model: nn.Module
    """Without values."""
    parts: Sequence[Part]
    converted: int
    """Bytes of the tensors of a micro-batch that the precision converts, afterwards."""
    named: Sequence[Mapping[str, Any]]
    """Arguments that the user names, whose time is compared with that of the proposals."""

    def simulate(
        self, arguments: Sequence[Mapping[str, int]], devices: int, num_nodes: int
    ) -> Sequence[Mapping[str, Memory] | str]:
        """Return the moments of a step for each of some arguments, or why it is refused."""

    def refusal(self, arguments: Mapping[str, int], devices: int, num_nodes: int) -> str:
        """Return why some arguments are refused, by a step with few layers; ""."""


@dataclass(frozen=True)
class Proposal:
    """Sizes that are worth comparing.

    Attributes:
        arguments: of the strategy.
        seconds: of a step, about.
        cost: seconds of all ranks that read a batch; the best proposal has the least.
        ranks_of_batch: the number of ranks that read the same batches.
        memory: bytes of a rank by part.
        is_simulated: whether the planner can simulate a step.
        reasons: a sentence for each size.
        why_not: why the model refuses the sizes; "".
    """

    arguments: Mapping[str, int]
    seconds: float = 0.0
    cost: float = 0.0
    ranks_of_batch: int = 1
    memory: Mapping[str, float] | None = None
    is_simulated: bool = True
    reasons: tuple[str, ...] = ()
    why_not: str = ""


def propose(job: Job) -> list[Proposal]:
    """Return the sizes that are worth comparing, the best first, then the refused ones.

    The best mesh takes the least time of all devices for a batch, among the sizes that fit; a
    simpler mesh is preferred if it takes at most 2% longer. The others are the best with other
    axes, and the mesh without any. If no mesh fits, the smallest come first. Formulas choose them;
    then simulated steps measure the memory, and a second choice follows.

    Args:
        job: the model and the machines.
    """
    profile, limits = measure(job)
    machines = Machines(job.devices, job.num_nodes, job.links, job.operations)
    options = {each.sizes: each for each in options_of(profile, limits, machines, job.usable)}
    refused: list[Proposal] = []
    for _ in range(_MOST_ROUNDS):
        chosen = _shortlist(list(options.values()))
        unknown = [each for each in chosen if each.can_simulate and not each.is_simulated]
        steps = job.simulate([each.sizes.arguments for each in unknown], job.devices, job.num_nodes)
        for option, moments in zip(unknown, steps, strict=True):
            if isinstance(moments, str):
                refused.append(Proposal(option.sizes.arguments, why_not=moments))
                del options[option.sizes]
            else:
                held = most_held(moments)
                options[option.sizes] = replace(option, memory=held, is_simulated=True)
        if not unknown:
            break
    chosen = _shortlist(list(options.values()))
    reasons = Reasons(list(options.values()), profile, limits, machines)
    best = chosen[0]
    return [
        Proposal(
            each.sizes.arguments,
            each.time.total,
            # The best is first, also before a mesh that saves less than 2% by more axes.
            max(each.cost, best.cost * (1 + 1e-9)) if each.fits and each is not best else each.cost,
            each.sizes.ranks_of_batch,
            each.memory,
            is_simulated=each.can_simulate,
            reasons=tuple(reasons.of(each)),
        )
        for each in chosen
    ] + [*refused, *_refused(job, limits), *_named(job, profile, machines)]


def _shortlist(options: Sequence[Option]) -> list[Option]:
    """Return the best option, the best ones with other axes, and the one without any."""
    chosen = [choose(options)]
    for option in sorted(options, key=lambda each: each.order):
        if len(chosen) == _MOST - 1:
            break
        if all(set(option.sizes.arguments) != set(each.sizes.arguments) for each in chosen):
            chosen.append(option)
    plain = [each for each in options if not each.sizes.arguments and each not in chosen]
    return [*chosen, *plain]


def _named(job: Job, profile: Profile, machines: Machines) -> Iterator[Proposal]:
    """Yield the times of the arguments that the user names, where they are of sizes alone."""
    for given in job.named:
        axes = {axis: given[axis] for axis in AXES if axis in given and axis != "shard"}
        if not given.keys() <= {*AXES, "schedule", "virtual_stages"}:
            continue
        ranks = machines.devices * machines.num_nodes
        shard, left = divmod(ranks, Sizes(**{**axes, "expert": 1}).world)
        sizes = Sizes(shard=shard, **axes)
        virtual = given.get("virtual_stages", 1)
        blocks = blocks_among(job.model, job.parts) if sizes.pipeline > 1 else 1
        if left or sizes.pipeline > blocks:
            continue
        time = step_time(profile, sizes, machines, virtual)
        cost = time.total * sizes.ranks_of_batch
        yield Proposal(given, time.total, cost, sizes.ranks_of_batch)


# -- the profile


def measure(job: Job) -> tuple[Profile, Limits]:
    """Return the profile of the model, by a step with few ranks along each axis.

    Raises:
        ConfigurationError: the model refuses a mesh of any sizes.
    """
    heads, experts = limits_of(job.model)
    shapes = _shapes(job.model)
    share = shapes.expert_share
    few = next((n for n in range(2, job.devices + 1) if job.devices % n == 0), 1)
    among = next((n for n in range(2, experts + 1) if experts % n == 0), 1) if share else 1
    wanted: dict[str, int] = {} if few == 1 else {"tensor": few, "context": few}
    if among > 1:
        wanted["expert"] = among
    nodes = job.num_nodes  # or as few as leave ranks to shard parameters beside an axis
    while job.devices * nodes // few < max(2, among) or job.devices * nodes % among:
        nodes += 1
    asked = [{}, *({axis: size} for axis, size in wanted.items())]
    first, *rest = job.simulate(asked, job.devices, nodes)
    world = job.devices * nodes
    if isinstance(first, str):
        raise ConfigurationError(first)
    alone, accumulates = Sizes(shard=world), job.micro_batches > 1
    probes, refused = {}, {}
    for (axis, size), moments in zip(wanted.items(), rest, strict=True):
        if isinstance(moments, str):
            refused[axis] = moments
        else:
            shard = world if axis == "expert" else world // size
            sizes = Sizes(shard=shard, **{axis: size})
            probes[axis] = Probe.of(sizes, moments, shapes.excess(sizes), accumulates=accumulates)
    if few == 1:
        refused.update(dict.fromkeys(("tensor", "context"), "a node has one device"))
    if not share:
        experts = 0
    stages, why_not = _most_stages(job, nodes)
    if why_not:
        refused["pipeline"] = why_not
    profile = Profile(
        Probe.of(alone, first, shapes.excess(alone), accumulates=accumulates),
        probes,
        job.parts,
        job.micro_batches,
        shapes,
        partial(stages_of, job.model, job.parts, measured=_measured(job) if stages else None),
        job.converted,
    )
    return profile, Limits(refused, heads, experts, stages)


def _most_stages(job: Job, nodes: int) -> tuple[int, str]:
    """Return the most stages of a pipeline, 0 if the model cannot be one, and why."""
    blocks = blocks_among(job.model, job.parts)
    if blocks < 2:
        return 0, "the model has no list of blocks to divide into stages"
    if job.micro_batches < 2:
        return 0, (
            "a step has one micro-batch, so that one stage would work at a time "
            "(accumulate_grad_batches=8 gives a step eight)"
        )
    while job.devices * nodes % 2:
        nodes += 1
    if why_not := job.refusal({"pipeline": 2}, job.devices, nodes):
        return 0, why_not
    return min(blocks, job.micro_batches), ""


def _measured(job: Job) -> Measured | None:
    """Return the costs by which training divides the model; None: its stages are of other parts."""
    units = check_stages(job.model, 1)
    return measure_units(job.model, units) if units.keys() <= {p.name for p in job.parts} else None


def _shapes(model: nn.Module) -> Shapes:
    """Return the shapes of the parameters; experts only if ranks can divide them."""
    try:
        experts = find_experts(model, None, 1).values()
    except ConfigurationError:
        experts = {}.values()
    inner = {id(p) for module in experts for p in module._parameters.values() if p is not None}
    return Shapes(
        Shape(p.numel() * p.element_size(), p.shape[0] if p.ndim else 1, id(p) in inner)
        for p in model.parameters()
    )


def _refused(job: Job, limits: Limits) -> list[Proposal]:
    """Return the sizes within a node that the model refuses, the simplest first."""
    axes = [axis for axis in ("tensor", "context") if axis in limits.refused and job.devices > 1]
    if not axes:
        return []
    free = Limits({"replicate": "", "pipeline": "", "expert": ""})
    rows = []
    for sizes in sorted(all_sizes(job.devices, 1, free), key=lambda each: each.complexity):
        axis = next((axis for axis in axes if sizes[axis] > 1), None)
        if axis is not None:
            rows.append(Proposal(sizes.arguments, why_not=limits.refused[axis]))
    return rows[:_MOST]
