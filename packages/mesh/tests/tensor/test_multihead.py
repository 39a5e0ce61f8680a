"""Attention of torch that is divided by heads between real ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/tensor_multihead.py"
Ranks = list[dict[str, Any]]
INFO = "tensor=2 divides the linear layers of Sequential, except '*.attention' ({}): pass"
WHOLE = [
    INFO.format("its weight is read directly"),
    INFO.format("has an out_proj of the class Ignored, which torch ignores"),
    INFO.format("has add_bias_kv=True, which adds a key for all heads"),
    INFO.format("has add_zero_attn=True, which adds a key for all heads"),
    "tensor=2 divides the linear layers of Encoder, except 'encoder.layers.*.self_attn' (has "
    "num_heads=1, which do not divide between 2 ranks): pass a tensor_plan",
]
PLANNED = "tensor_plan divides {!r} by 'multihead', and it {}: each rank computes whole heads"
CALLED = "'attention' (MultiheadAttention) was called with "
MESSAGES = {
    "heads": PLANNED.format("attention", "has num_heads=1, which do not divide between 2 ranks"),
    "kind": PLANNED.format("0", "is of the class Linear, and not torch's MultiheadAttention"),
    "out_proj": "tensor_plan divides 'attention' by 'multihead', and 'attention.out_proj' by "
    "'colwise': expected 'rowwise', or no style for it",
    "adapter": "tensor_plan divides 'attention' by 'multihead', and it has a LoRA adapter, which "
    "reads the whole weights of nn.MultiheadAttention: expected a tensor_plan without it",
    "adapter of out_proj": PLANNED.format(
        "attention", "has an out_proj of the class Adapted, which torch ignores"
    ),
    "add_bias_kv": PLANNED.format(
        "attention", "has add_bias_kv=True, which adds a key for all heads"
    ),
    "add_zero_attn": PLANNED.format(
        "attention", "has add_zero_attn=True, which adds a key for all heads"
    ),
    "mask": f"{CALLED}attn_mask of (1, 6): expected (6, 6) or (8, 6, 6)",
    "padding": f"{CALLED}key_padding_mask of (6, 2): expected (2, 6)",
    "dimensions": f"{CALLED}queries, keys and values of (2, 6, 16), (2, 16), (2, 6, 16): expected "
    "tensors of 2 or 3 dimensions, and as many keys as values",
    "causal": f"{CALLED}is_causal=True alone: expected attn_mask too, such as "
    "nn.Transformer.generate_square_subsequent_mask(length)",
    "nested": f"{CALLED}queries, keys and values of nested tensors: expected tensors",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("multihead")
    run_file(SCRIPT, str(folder), folder=folder, timeout=400)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def test_outputs_weights_and_gradients_of_each_call_equal_one_process(ranks: Ranks) -> None:
    errors = {name: max(rank["calls"][name] for rank in ranks) for name in ranks[0]["calls"]}
    assert len(errors) == 23
    assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


def test_models_of_torch_equal_one_process_in_training_and_evaluation(ranks: Ranks) -> None:
    errors = {name: max(rank["models"][name] for rank in ranks) for name in ranks[0]["models"]}
    assert len(errors) == 18
    assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


def test_an_encoder_returns_zeros_at_padding_in_evaluation_as_torch_does(ranks: Ranks) -> None:
    assert [rank["padding"] for rank in ranks] == [[0.0, 0.0], [0.0, 0.0]]


def test_a_rank_holds_half_of_the_weights(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["held"] == {
            "attention.in_proj_weight": 0.5,
            "attention.in_proj_bias": 0.5,
            "attention.out_proj.weight": 0.5,
            "attention.out_proj.bias": 1.0,
        }


def test_heads_of_ranks_drop_other_keys_and_other_layers_the_same(ranks: Ranks) -> None:
    first, again, after = ranks[0]["dropped"]
    assert ranks[1]["dropped"] == ranks[0]["dropped"]  # the weights of all heads
    heads = first[0]
    assert heads[0] != heads[2]  # the first heads of both ranks
    assert first != again
    assert 0 < after < 1


def test_attention_that_stays_whole_is_reported_with_the_reason(ranks: Ranks) -> None:
    received = ranks[0]["whole"]
    assert len(received) == len(WHOLE)
    for message, expected in zip(received, WHOLE, strict=True):
        assert message.startswith(expected)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_divided_is_refused_on_every_rank(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["messages"][name].startswith(MESSAGES[name])


def test_steps_on_meshes_equal_one_process_and_load_there(tmp_path: Path) -> None:
    script = SCRIPT.with_name("tensor_multihead_mesh.py")
    run_file(script, "found.json", folder=tmp_path, timeout=600)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 9
    assert {row["weights read back"] for row in found.values()} == {0.0}
    errors = {name: max(row.values()) for name, row in found.items()}
    assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
