"""What formulas say of sizes, beside simulated steps of these sizes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from stratagem_mesh.planning import choice
from stratagem_mesh.planning.options import options_of
from stratagem_mesh.planning.profile import most_held
from stratagem_mesh.planning.sizes import Sizes
from stratagem_mesh.planning.time import Machines

pytest.importorskip("stratagem_extras")
transformers = pytest.importorskip("transformers")

SIZES = ({"tensor": 4}, {"context": 4}, {"replicate": 2, "tensor": 2}, {"tensor": 2, "context": 2})


def build() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def planned(**options: Any) -> tuple[Any, choice.Job]:
    from stratagem import plan_memory

    jobs: list[choice.Job] = []
    propose = choice.propose

    def noted(job: choice.Job) -> Any:
        jobs.append(job)
        return propose(job)

    ids = torch.ones(1, 512, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    with patch.object(choice, "propose", noted):
        plan = plan_memory(
            build,
            batch,
            devices=4,
            num_nodes=2,
            device="H100",
            precision="bf16-true",
            strategies=["mesh"],
            **options,
        )
    return plan, jobs[0]


def test_formulas_agree_with_simulated_steps() -> None:
    from stratagem_extras.planner.plan import _planning

    plan, job = planned()
    with _planning():
        profile, limits = choice.measure(job)
        steps = job.simulate(SIZES, 4, 2)
    machines = Machines(4, 2, job.links, job.operations)
    options = options_of(profile, limits, machines, job.usable)
    by_arguments = {tuple(sorted(each.sizes.arguments.items())): each for each in options}
    for arguments, moments in zip(SIZES, steps, strict=True):
        assert not isinstance(moments, str)
        option = by_arguments[tuple(sorted(arguments.items()))]
        held = sum(most_held(moments).values())
        several = "tensor" in arguments and "context" in arguments
        assert option.bytes == pytest.approx(held, rel=0.25 if several else 0.15), arguments
        assert profile.flops(option.sizes) == pytest.approx(moments["step"].flops, rel=0.01)
    # What a row shows is that of its own step.
    rows = {row.name: row for row in plan.strategies}
    assert all(row.how == "simulated" for row in rows.values())
    best = plan.best
    assert best.fits
    named = [reason.partition(":")[0] for reason in best.reasons]
    assert named == ["no pipeline", "replicate 2", "shard 4", "no context", "no tensor"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_formulas_of_stages_agree_with_simulated_pipelines(checkpointing: bool) -> None:
    from stratagem_extras.planner.plan import _planning

    options = {"accumulate_grad_batches": 6, "activation_checkpointing": checkpointing}
    _, job = planned(**options)
    chosen: list[dict[str, Any]] = [
        {"pipeline": 2},
        {"pipeline": 4},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 4, "schedule": "gpipe"},
    ]
    with _planning():
        profile, limits = choice.measure(job)
        steps = job.simulate(chosen, 4, 2)
    assert limits.stages == 4
    for arguments, moments in zip(chosen, steps, strict=True):
        assert not isinstance(moments, str)
        axes = {axis: size for axis, size in arguments.items() if axis != "schedule"}
        sizes = Sizes(shard=8 // Sizes(**axes).world, **axes)
        by_formula = sum(profile.memory(sizes, arguments.get("schedule", "1f1b")).values())
        held = sum(most_held(moments).values())
        assert by_formula == pytest.approx(held, rel=0.1), arguments


def test_a_device_that_is_too_small_names_the_nodes_that_are_enough() -> None:
    plan, job = planned(device_memory="6MB")
    assert plan.best is None
    nearest = min(
        (row for row in plan.strategies if row.memory is not None), key=lambda row: row.on_device
    )
    assert nearest.reasons[-1].endswith((" on a rank", "for these micro-batches"))
    assert job.num_nodes == 2
