"""Sizes that a plan proposes, for a model whose memory is known by a law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.pipeline.cuts import find_stages
from stratagem_mesh.planning.choice import measure
from stratagem_mesh.planning.sizes import Limits, Sizes, all_sizes
from stratagem_mesh.planning.stages import stages_of
from stratagem_mesh.planning.time import Links

GIB = 2**30
HEADS = 64


@dataclass(frozen=True)
class Held:
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    working: int
    sent: int
    flops: int
    communication: int = 0


@dataclass(frozen=True)
class Cables:
    link: float = 450e9
    network: float = 50e9

    def between(self, ranks: int, nodes: int) -> float:
        return self.link if nodes == 1 else min(self.link, self.network * ranks)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.weight = nn.Parameter(torch.empty(2**16, 2**6, device="meta"))


@dataclass
class Job:
    """Parameters divide by shards and `tensor`, activations by `tensor` and `context`."""

    devices: int = 8
    num_nodes: int = 1
    usable: int = 71 * GIB
    weights: int = 130 * GIB
    activations: int = 10 * GIB
    whole: int = 2 * GIB
    refused: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, int] = field(default_factory=dict)
    links: Links = field(default_factory=Cables)
    operations: float = 4e14
    micro_batches: int = 1
    parts: Sequence[Any] = ()
    converted: int = 0
    model: nn.Module = field(default_factory=Model)
    named: Sequence[Mapping[str, Any]] = ()
    calls: list[dict[str, int]] = field(default_factory=list)

    def refusal(self, arguments: Mapping[str, int], devices: int, num_nodes: int) -> str:
        return next((self.refused[axis] for axis in arguments if axis in self.refused), "")

    def simulate(
        self, arguments: Sequence[Mapping[str, int]], devices: int, num_nodes: int
    ) -> list[dict[str, Held] | str]:
        return [self.step(dict(each), devices * num_nodes) for each in arguments]

    def step(self, sizes: dict[str, int], ranks: int) -> dict[str, Held] | str:
        self.calls.append(sizes)
        for axis in sizes:
            if axis in self.refused:
                return self.refused[axis]
        tensor, context = sizes.get("tensor", 1), sizes.get("context", 1)
        shards = ranks // tensor // sizes.get("replicate", 1)
        weights = self.weights // tensor
        own = weights // shards
        kept = self.activations // tensor // context + self.whole
        kept += sum(self.more.get(axis, 0) for axis in sizes)
        sent = 3 * weights + sum(200 * GIB for axis in sizes if axis != "replicate")
        flops = int(3e15) // tensor // context
        return {
            name: Held(own, own, 2 * own, 0, working, sent, flops)
            for name, working in (("forward", kept), ("backward", kept), ("step", 0))
        }


def best(job: Job) -> Any:
    return MeshStrategy.propose(job)[0]


def bytes_of(proposal: Any) -> float:
    total: float = sum(proposal.memory.values())
    return total


def reason(proposal: Any, axis: str) -> str:
    found: str = next(text for text in proposal.reasons if axis in text.partition(":")[0])
    return found


@pytest.mark.parametrize("nodes", [1, 2, 8, 32, 128])
def test_sizes_chosen_for_8_to_1024_devices_fit(nodes: int) -> None:
    job = Job(num_nodes=nodes, weights=60 * GIB, activations=200 * GIB)
    proposals = MeshStrategy.propose(job)
    held = [bytes_of(each) for each in proposals if not each.why_not]
    assert held[0] <= job.usable
    costs = [each.cost for each in proposals if bytes_of(each) <= job.usable]
    assert costs == sorted(costs)
    step = job.step(dict(proposals[0].arguments), 8 * nodes)
    assert not isinstance(step, str)
    most = max(m.parameters + m.gradients + m.optimizer + m.working for m in step.values())
    assert held[0] == most


def test_shards_alone_are_taken_where_they_fit() -> None:
    found = best(Job(num_nodes=8))
    assert found.arguments == {}
    said = reason(found, "shard")
    assert said.startswith(
        "shard 64: parameters, gradients and the optimizer's state of 520.00 GiB"
    )
    assert "divide between 64 ranks; a rank holds 20.12 GiB of the 71.00 GiB" in said
    assert "no tensor: with it a batch takes" in reason(found, "tensor")
    said = "longer at best (shard 32 x tensor 2, 6% of it in all-reduces of activations)"
    assert said in reason(found, "tensor")


def test_activations_that_do_not_fit_are_divided_and_the_reason_says_their_size() -> None:
    found = best(Job(num_nodes=8, activations=100 * GIB, refused={"context": "context=2, but no"}))
    assert found.arguments == {"tensor": 2}
    said = reason(found, "tensor")
    assert said.startswith("tensor 2: ranks of a node compute 32 of 64 heads; without it the least")
    assert "is 110.12 GiB on a rank (shard 64); of a larger size a batch takes " in said
    assert "longer at best (shard 16 x tensor 4, " in said
    assert reason(found, "context") == "no context: context=2, but no"


def test_copies_are_taken_where_the_network_is_slow() -> None:
    slow = Job(num_nodes=4, weights=8 * GIB, links=Cables(network=1e8))
    found = best(slow)
    assert found.arguments == {"replicate": 4}
    said = reason(found, "replicate")
    assert said.startswith("replicate 4: copies of the parameters, each gathered among fewer ranks")
    assert "without it a batch takes" in said


def test_a_simpler_mesh_is_preferred_to_two_percent_less_time() -> None:
    found = best(Job(num_nodes=8, links=Cables(network=1e15)))
    assert found.arguments == {}


def test_sizes_that_hold_more_than_the_formulas_say_are_not_the_best() -> None:
    plain = Job(num_nodes=8, activations=100 * GIB)
    assert set(best(plain).arguments) == {"context"}
    # With both axes a rank holds more than each of them adds, which only a step shows.
    tricky = Job(num_nodes=8, activations=100 * GIB, more={"context": 20 * GIB})
    found = best(tricky)
    assert bytes_of(found) <= tricky.usable
    assert found.arguments in tricky.calls


def test_axes_that_a_model_refuses_are_listed_with_its_message() -> None:
    job = Job(refused={"tensor": "tensor=2, but no layer is divided: name them"})
    proposals = MeshStrategy.propose(job)
    refused = [each for each in proposals if each.why_not]
    assert refused[0].arguments == {"tensor": 2}
    assert {each.why_not for each in refused} == {"tensor=2, but no layer is divided: name them"}
    assert reason(proposals[0], "tensor") == "no tensor: tensor=2, but no layer is divided"


def test_a_device_that_holds_nothing_is_told_how_many_nodes_are_enough() -> None:
    proposal = best(Job(weights=400 * GIB))
    assert bytes_of(proposal) > 71 * GIB
    assert proposal.reasons[-1].startswith("4 nodes are enough: shard ")
    never = best(Job(weights=400 * GIB, usable=GIB))
    assert never.reasons[-1] == ("1024 of these devices are not enough for these micro-batches")


def test_a_model_that_refuses_every_mesh_is_refused_by_its_message() -> None:
    class Refuses(Job):
        def step(self, sizes: dict[str, int], ranks: int) -> str:
            return "the model is compiled whole"

    with pytest.raises(ConfigurationError, match="the model is compiled whole"):
        MeshStrategy.propose(Refuses())


def test_one_device_on_each_node_has_no_axis_within_a_node() -> None:
    found = best(Job(devices=1, num_nodes=16))
    assert reason(found, "tensor") == "no tensor: a node has one device"


def test_sizes_keep_heads_whole_and_stay_on_a_node() -> None:
    sizes = list(all_sizes(8, 4, Limits(heads=12)))
    assert {each.tensor for each in sizes} == {1, 2, 4}
    assert all(8 % (each.tensor * each.context) == 0 for each in sizes)
    assert all(each.world == 32 for each in sizes)
    assert str(Sizes(shard=4, context=2)) == "shard 4 x context 2"


# -- pipelines


class Blocks(nn.Module):
    """An embedding, 16 blocks and a head for one of two tokens, of one gibibyte each."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.example_input_array = torch.zeros(1, 2, dtype=torch.int64)
        with torch.device("meta"):
            self.embedding = nn.Embedding(2**14, 2**14)
            self.blocks = nn.ModuleList(nn.Linear(2**14, 2**14, bias=False) for _ in range(16))
            self.head = nn.Linear(2**14, 2**14, bias=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden[:, -1:])


def rows(activations: int = GIB) -> list[Any]:
    """Return the parts of `Blocks`."""

    def row(name: str, activations: int = 0, flops: int = 0) -> Any:
        return SimpleNamespace(
            name=name, parameters=GIB, activations=activations, flops=flops, output=GIB // 64
        )

    blocks = (row(f"blocks.{number}", activations, 6 * GIB) for number in range(16))
    return [row("embedding"), *blocks, row("head", 0, 3 * GIB), row("", activations)]


@dataclass
class OfBlocks(Job):
    """A step of `Blocks`: several micro-batches keep whole gradients, so that all must fit."""

    weights: int = 18 * GIB
    activations: int = 16 * GIB
    micro_batches: int = 32
    parts: Sequence[Any] = field(default_factory=rows)
    model: nn.Module = field(default_factory=Blocks)

    def step(self, sizes: dict[str, int], ranks: int) -> dict[str, Held] | str:
        found = super().step(sizes, ranks)
        if isinstance(found, str):
            return found
        whole = self.weights // sizes.get("tensor", 1)
        stages = sizes.get("pipeline", 1)
        return {
            name: Held(
                held.parameters // stages,
                held.gradients // stages,
                held.optimizer // stages,
                0,
                held.working if name == "step" else held.working + whole - held.gradients,
                self.micro_batches * held.sent,
                self.micro_batches * held.flops,
            )
            for name, held in found.items()
        }


SLOW = Cables(network=1e8)
NO_CONTEXT = {"context": "context=2, but no module reads a sequence"}


def test_stages_lie_on_nodes_where_the_network_is_slow_and_copies_do_not_fit() -> None:
    job = OfBlocks(num_nodes=4, usable=8 * GIB, links=SLOW, refused=NO_CONTEXT)
    found = best(job)
    assert found.arguments == {"tensor": 8, "pipeline": 4}
    assert bytes_of(found) <= job.usable
    said = reason(found, "pipeline")
    assert said.startswith("pipeline 4: a rank has 4 of 16 blocks, and waits ")
    assert "% of a step of 32 micro-batches; without it a batch takes " in said
    assert "longer at best (shard 4 x tensor 8)" in said


def test_no_pipeline_is_taken_where_links_are_fast() -> None:
    found = best(OfBlocks(num_nodes=4, links=Cables(network=1e12)))
    assert found.arguments == {}
    said = reason(found, "pipeline")
    assert said.startswith("no pipeline: with it a batch takes ")
    assert "of it in the pipeline's bubble" in said


def test_a_pipeline_has_at_most_as_many_stages_as_micro_batches() -> None:
    job = OfBlocks(num_nodes=4, usable=8 * GIB, micro_batches=2, links=SLOW, refused=NO_CONTEXT)
    stages = {each.arguments.get("pipeline", 1) for each in MeshStrategy.propose(job)}
    assert stages == {1, 2}


def test_a_pipeline_is_taken_where_the_layers_do_not_fit_without() -> None:
    refused = {"tensor": "no layer is divided", **NO_CONTEXT}
    job = OfBlocks(num_nodes=4, usable=30 * GIB, refused=refused)
    found = best(job)
    assert found.arguments == {"pipeline": 4}
    assert bytes_of(found) <= job.usable
    plain = next(each for each in MeshStrategy.propose(job) if not each.arguments)
    assert not any("enough" in said for said in plain.reasons)
    assert "without it the least is 37.69 GiB on a rank" in reason(found, "pipeline")


def test_a_pipeline_of_too_many_steps_is_planned_by_formulas_and_its_reasons_say_so() -> None:
    said = (
        "the memory follows from formulas: a pipeline is simulated with all of its layers and "
        "micro-batches, which takes long here"
    )
    job = OfBlocks(num_nodes=4, usable=8 * GIB, links=SLOW, refused=NO_CONTEXT)
    found = best(job)
    assert (found.is_simulated, found.reasons[-1]) == (False, said)
    assert found.arguments not in job.calls
    short = OfBlocks(num_nodes=4, usable=8 * GIB, micro_batches=8, links=SLOW, refused=NO_CONTEXT)
    found = best(short)
    assert found.is_simulated
    assert said not in found.reasons
    assert found.arguments in short.calls


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (
            OfBlocks(micro_batches=1),
            "a step has one micro-batch, so that one stage would work at a time "
            "(accumulate_grad_batches=8 gives a step eight)",
        ),
        (Job(micro_batches=8), "the model has no list of blocks to divide into stages"),
        (
            OfBlocks(refused={"pipeline": "a tensor is changed in place: ..."}),
            "a tensor is changed in place",
        ),
    ],
)
def test_the_reason_names_the_obstacle_to_a_pipeline(job: Job, why: str) -> None:
    found = best(job)
    assert "pipeline" not in found.arguments
    assert reason(found, "pipeline") == f"no pipeline: {why}"


def test_a_plan_and_a_pipeline_have_equal_stages() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.Linear(8, 64))
    example = torch.ones(4, 8)
    parts = [
        SimpleNamespace(name=str(number), parameters=1, activations=1, flops=flops, output=8)
        for number, flops in enumerate([64] * 6 + [512])
    ]
    for count in (2, 3, 4):
        cuts = find_stages(model, count, example=example).cuts
        starts = [str(stage.parts.start) for stage in stages_of(model, parts, count)]
        assert starts == ["0", *cuts]


def test_proposals_have_the_stages_of_training_where_a_plan_counts_other_operations() -> None:
    """As the planner does of experts, whose tokens a run without values cannot count."""
    parts = rows()
    for part in parts[1:9]:
        part.flops *= 4
    job = OfBlocks(num_nodes=4, usable=30 * GIB, parts=parts, refused=NO_CONTEXT)
    profile, _ = measure(job)
    for count in (2, 4):
        names = [parts[stage.parts.start].name for stage in profile.stages(count)]
        assert names == ["embedding", *find_stages(job.model, count).cuts]


def test_a_pipeline_holds_the_converted_inputs_of_all_micro_batches() -> None:
    sizes = Sizes(pipeline=4, shard=8)
    options: dict[str, Any] = {"num_nodes": 4, "micro_batches": 8, "refused": NO_CONTEXT}
    profile, _ = measure(OfBlocks(**options))
    more, _ = measure(OfBlocks(converted=GIB, **options))
    held = [sum(each.memory(sizes).values()) for each in (profile, more)]
    assert held[1] - held[0] == 7 * GIB  # a step without a pipeline counts those of one


def test_a_weight_that_stages_share_is_whole_on_each() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    model[3].weight = model[0].weight
    parts = [
        SimpleNamespace(name=str(n), parameters=256 * (n < 3), activations=1, flops=1, output=8)
        for n in range(4)
    ]
    first, last = stages_of(model, parts, 2)
    assert (first.sharded, first.whole) == (1 / 3, 1 / 3)
    assert (last.sharded, last.whole) == (1 / 3, 1 / 3)


def test_named_sizes_are_timed_by_the_formulas() -> None:
    job = OfBlocks(num_nodes=4, named=[{"pipeline": 2}, {"pipeline": 2, "check_context": False}])
    *proposals, named = MeshStrategy.propose(job)
    assert named.arguments == {"pipeline": 2}
    same = [each for each in proposals if each.arguments == {"pipeline": 2}]
    assert all(each.seconds == named.seconds for each in same)
    assert named.seconds > 0
    assert named.ranks_of_batch == 2
