"""Plans of meshes, beside real steps."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn

from stratagem import Trainer
from stratagem.errors import ConfigurationError

SCRIPT = Path(__file__).parent / "scripts/planned_memory.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("planned_memory_of_meshes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytest.importorskip("stratagem_extras")
script = load_script()


def planned(devices: int, *strategies: str, **options: Any) -> Any:
    from stratagem import plan_memory

    return plan_memory(script.Net, script.batch, devices=devices, strategies=strategies, **options)


@pytest.mark.slow
def test_planned_memory_is_within_10_percent_of_real_steps(tmp_path: Path) -> None:
    out = tmp_path / "ratios.json"
    run_file(SCRIPT, str(out), folder=tmp_path, timeout=300)
    ratios = json.loads(out.read_text())
    assert sorted(ratios) == sorted(script.MESHES)
    assert ratios == {name: pytest.approx(1, abs=0.1) for name in script.MESHES}


def test_the_name_mesh_has_a_row_for_each_size() -> None:
    plan = planned(2, "mesh", device="A10")
    rows = {row.name: row for row in plan.strategies}
    assert {name: row.ranks_of_batch for name, row in rows.items()} == {
        "mesh": 1,
        "mesh(tensor=2)": 2,
        "mesh(context=2)": 2,
    }
    assert all(row.how == "simulated" for row in rows.values())
    whole, tensor = rows["mesh"].memory, rows["mesh(tensor=2)"].memory
    assert tensor.working < whole.working
    assert tensor.flops < whole.flops
    # Both ranks compute one batch: the time of a batch is compared, not that of a step.
    order = [row.seconds * row.ranks_of_batch for row in plan.strategies]
    assert order == sorted(order)


def test_a_pipeline_is_planned_by_its_fullest_stage() -> None:
    options = {"device": "A10", "accumulate_grad_batches": 4}
    plan = planned(2, "mesh(pipeline=2)", "mesh(pipeline=2, schedule='gpipe')", **options)
    rows = {row.name: row for row in plan.strategies}
    early, late = rows["mesh(pipeline=2)"], rows["mesh(pipeline=2, schedule='gpipe')"]
    assert all(row.how == "simulated" and row.ranks_of_batch == 2 for row in rows.values())
    # 1F1B holds the activations of two micro-batches, GPipe those of all four.
    assert early.memory.activations + early.memory.temporary < late.memory.working
    assert early.memory.total < late.memory.total
    # (stages - 1) / micro-batches, as in section 2.2 of arXiv:2104.04473.
    assert early.waits == late.waits == 0.25
    assert early.seconds > 0.5 * planned(1, "mesh", **options).strategies[0].seconds


def test_experts_are_planned_as_if_used_evenly() -> None:
    from stratagem import plan_memory

    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    config = transformers.MixtralConfig(
        **sizes, intermediate_size=256, num_hidden_layers=2, num_key_value_heads=2
    )

    def build() -> Any:
        return transformers.MixtralForCausalLM(config)

    ids = torch.ones(2, 12, dtype=torch.int64)
    meshes = ["mesh", "mesh(expert=2)", "mesh(expert=2, tensor=2)"]
    plan = plan_memory(
        build,
        {"input_ids": ids, "labels": ids},
        devices=4,
        device_memory="1GB",
        precision="bf16-true",
        strategies=meshes,
    )
    rows = {row.name: row for row in plan.strategies}
    assert all(rows[name].how == "simulated" for name in meshes), rows
    whole, divided = rows["mesh"].memory, rows["mesh(expert=2)"].memory
    assert divided.flops == whole.flops
    assert divided.working < whole.working


def test_the_call_of_a_mesh_can_be_pasted() -> None:
    call = planned(2, "mesh(tensor=2)", device_memory=None).call
    assert call == (
        "from stratagem_mesh import MeshStrategy\n\n"
        "Trainer(accelerator='cpu', devices=2, strategy=MeshStrategy(tensor=2))"
    )
    line, _, trainer = call.partition("\n\n")
    space: dict[str, Any] = {"Trainer": partial(Trainer, logger=False)}
    exec(line, space)
    assert eval(trainer, space).strategy.sizes == (1, 1, 1, 1, 2)


def test_sizes_that_a_model_refuses_share_a_row() -> None:
    from stratagem import plan_memory

    plan = plan_memory(
        lambda: torch.nn.Linear(3, 5),
        torch.zeros(2, 3),
        devices=4,
        device_memory="1GB",
        strategies=["mesh"],
    )
    rows = {row.name: row for row in plan.strategies}
    assert rows["mesh"].fits
    tensor, context = rows["mesh(tensor=2)"], rows["mesh(context=2)"]
    assert tensor.why_not.startswith("tensor=2, but no layer of Linear is divided")
    assert tensor.alike == ("mesh(tensor=4)", "mesh(tensor=2, context=2)")
    assert context.why_not.startswith("context=2, but Linear has no model of transformers")
    assert context.alike == ("mesh(context=4)",)


def test_layers_that_are_computed_again_are_extrapolated_on_a_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stratagem import plan_memory
    from stratagem_extras.planner import simulation
    from stratagem_extras.planner.decoder import PlannedDecoder

    def total() -> int:
        plan = plan_memory(
            lambda: PlannedDecoder(4e6, layers=16, hidden=128, vocabulary=4000),
            torch.zeros(1, 256, dtype=torch.int64),
            devices=4,
            device="H100",
            precision="bf16-true",
            activation_checkpointing=True,
            strategies=["mesh(tensor=2)"],
        )
        (row,) = plan.strategies
        assert row.how == "simulated"
        return row.memory.total  # type: ignore[no-any-return]

    monkeypatch.setattr(simulation, "_BEYOND_BUCKETS", 1)
    some = total()
    monkeypatch.setattr(
        simulation.SimulatedModel, "_few", lambda model, stack, layers, limits: layers
    )
    assert some == pytest.approx(total(), rel=0.01)


def test_a_pipeline_that_training_refuses_is_refused_by_the_plan() -> None:
    from stratagem import plan_memory

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden) if hidden.sum() > 0 else layer(2 * hidden)
            return hidden

    plan = plan_memory(
        Decides,
        torch.zeros(2, 8),
        devices=2,
        device="A10",
        strategies=["mesh(pipeline=2)", "mesh"],
        accumulate_grad_batches=4,
    )
    rows = {row.name: row for row in plan.strategies}
    assert "reads a value of stage 0" in rows["mesh(pipeline=2)"].why_not
    assert "cannot follow what user code decides by it" in rows["mesh(pipeline=2)"].why_not
    assert any("no pipeline: " in said for said in rows["mesh"].reasons)
    assert rows["mesh"].fits


def test_a_misspelled_argument_is_refused_before_the_model_is_built() -> None:
    from stratagem import plan_memory

    def build() -> nn.Module:
        raise AssertionError("the model was built")

    for text, message in (
        ("mesh(pipelne=2)", r"MeshStrategy\(pipelne=2\): unknown; expected some of "),
        ("mesh(pipeline=0)", "pipeline=0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            plan_memory(build, torch.zeros(1), devices=2, strategies=[text])


def test_copies_of_a_divided_model_are_simulated() -> None:
    for devices, nodes in ((4, 1), (2, 2)):
        plan = planned(devices, "mesh(replicate=2, tensor=2)", num_nodes=nodes, device="A10")
        assert [row.how for row in plan.strategies] == ["simulated"], plan.strategies


def test_a_weight_that_stages_share_is_stepped_beside_sharded_ones_on_a_gpu() -> None:
    from stratagem import plan_memory

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layers(self.embedding(tokens)))  # type: ignore[no-any-return]

    (row,) = plan_memory(
        Tied,
        torch.zeros(2, 8, dtype=torch.long),
        devices=4,
        device="A10",
        strategies=["mesh(pipeline=2)"],
        accumulate_grad_batches=4,
    ).strategies
    assert (row.how, row.why_not) == ("simulated", "")
