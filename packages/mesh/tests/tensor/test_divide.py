"""Layers that are divided between two real ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/tensor_divide.py"
DIVIDED = {
    "sequential": ["0", "2", "4", "6"],
    "encoder": [
        f"layers.{index}.{layer}"
        for index in (0, 1)
        for layer in ("linear1", "linear2", "self_attn", "self_attn.out_proj")
    ],
    "separate": [*(f"attention.{n}" for n in ("k", "norm", "out", "q", "v")), "down", "up"],
    "eager": [*(f"attention.{n}" for n in ("k", "norm", "out", "q", "v")), "down", "up"],
    "fused": ["attention.out", "attention.qkv", "down", "up"],
    "packed": ["down", "gates", "out", "qkv"],
    "returned": ["1", "2"],
    "scaled": ["down", "up"],
    "tied": ["down", "embedding", "head", "up"],
    "gathered": ["0", "2", "4", "6"],
    "adapted": ["0", "2", "3"],
    "repeated": ["0", "2"],
    "found with adapters": ["0", "2"],
    "experts": ["feed.down", "feed.up"],
}
MESSAGES = {
    "pattern": "tensor_plan has 'attention.quaries', which names no module of Language: expected "
    "names such as 'attention.q', ",
    "kind": "'norm' is a LayerNorm, which colwise does not divide: expected linear layers",
    "nothing": "tensor=2, but no layer of Language is divided, so that 2 ranks would each do all "
    "the work: pass a tensor_plan",
    "heads": "attention has num_heads=3, which do not divide between 2 ranks: each rank computes "
    "whole heads. Choose a size of the tensor axis that divides them",
    "features": "0.weight has 7 features, which do not divide between 2 ranks: choose another "
    "size of the tensor axis",
    "no example": "Sequential has no plan that the mesh can use, and no example of an input to "
    "find layers by: pass MeshStrategy(tensor_plan=",
    "bad example": "Sequential was run on tensors without values, to find the layers to divide, "
    "and raised RuntimeError: a and b must have same reduction dim",
    "one layer": "tensor=2, but no layer of Sequential is divided",
    "variant of LoRA": "'0' has an adapter of the kind object (tensor_models), which the tensor "
    "axis does not divide: expected LoRA without variants, target_modules without divided layers",
    "style of LoRA": "tensor_plan divides '0' by ColwiseParallel, and it has a LoRA adapter: "
    "expected the name of a style, such as 'colwise', which divides the adapter too",
}
Ranks = list[dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("divide")
    run_file(SCRIPT, str(folder), "2", folder=folder)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize("case", DIVIDED)
def test_loss_and_gradients_equal_one_process(case: str, ranks: Ranks) -> None:
    for rank in ranks:
        found = rank[case]
        assert sorted(found["layers"]) == DIVIDED[case]
        assert found["loss"] < 1e-12
        assert found["gradient"] < 1e-10
        assert found["evaluation"] < 1e-12
        assert found["values"] is True


def test_tied_weights_stay_one_parameter(ranks: Ranks) -> None:
    layers = ranks[0]["tied"]["layers"]
    assert layers["embedding"] == "embedding_rowwise"
    assert layers["head"] == "colwise_gather_output"
    assert ranks[0]["tied"]["tied"] is True
    assert ranks[0]["separate"]["tied"] is True  # both are whole


def test_layers_that_stay_whole_are_reported_once(ranks: Ranks) -> None:
    assert ranks[0]["info"] == [
        "tensor=2 divides the linear layers of Sequential, except '*.down' (whole features that "
        "are trained meet it), '*.seen' (an operand has all the features), '*.up' (an operation "
        "reduces divided features): pass a tensor_plan to divide others"
    ]
    assert ranks[1]["info"] == []


def test_packed_layers_are_divided_each(ranks: Ranks) -> None:
    assert ranks[0]["packed"]["layers"]["qkv"] == "colwise_packed_3"
    assert ranks[0]["packed"]["layers"]["gates"] == "colwise_packed_2"


def test_a_copy_of_a_divided_model_computes_the_same(ranks: Ranks) -> None:
    assert {rank[case]["copy"] for rank in ranks for case in DIVIDED} == {0.0}


def test_dropout_differs_between_ranks_within_divided_layers_alone(ranks: Ranks) -> None:
    first, second = (rank["masks"][:2] for rank in ranks)
    for (inside, outside), (other_inside, other_outside) in zip(first, second, strict=True):
        assert inside != other_inside
        assert outside == other_outside
    assert first[0] != first[1]


def test_dropout_outside_divided_layers_equals_one_process(ranks: Ranks) -> None:
    outside = [kept for _, kept in ranks[0]["masks outside"]]
    assert outside[:2] == outside[2:]


def test_dropout_of_adapters_differs_between_ranks_for_divided_inputs_alone(ranks: Ranks) -> None:
    first, second = (rank["adapter masks"] for rank in ranks)
    for colwise, rowwise in ((0, 1), (2, 3)):
        assert first[colwise] == second[colwise]
        assert first[rowwise] != second[rowwise]
    assert first[0] != first[2]
    assert first[-1] == second[-1]


@pytest.mark.parametrize("name", MESSAGES)
def test_bad_plans_are_refused_on_every_rank(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["messages"][name].startswith(MESSAGES[name])


def test_a_step_with_shards_equals_one_process_and_loads_there(tmp_path: Path) -> None:
    run_file(SCRIPT.with_name("tensor_mesh.py"), "found.json", folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("weights read back") == 0.0
    assert {"gradients", "gradient norm", "weights"} <= found.keys()
    assert max(found.values()) < 1e-10
