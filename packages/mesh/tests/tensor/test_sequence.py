"""Blocks that hold parts of a sequence on two real ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/tensor_sequence.py"
CASES = "whole", "filled", "one position", "checkpointed", "checkpointed calls", "one block"
MESSAGES = {
    "no blocks": "sequence_parallel=True, but Text has no blocks, which are modules of an "
    "nn.ModuleList or nn.Sequential with pairs of divided layers (colwise, then rowwise): pass "
    "sequence_parallel=False",
    "function": "sequence_parallel=True needs layers of known styles, and tensor_plan is a "
    "function: expected a mapping of names to styles",
    "convolution": "sequence_parallel=True, and 'body.blocks.1.norm' in a block is a Conv1d, which "
    "reads several positions and has no pair of divided layers: pass sequence_parallel=False",
    "attention": "sequence_parallel=True, and 'body.blocks.1.norm' in a block is a "
    "MultiheadAttention, which reads several positions",
    "depth": "sequence_parallel=True, and body has layerdrop=0.5: each rank would drop other "
    "layers or samples of its part of the sequence. Set layerdrop to 0, or pass "
    "sequence_parallel=False",
    "two passes": "activation checkpointing recomputes a block over 6 positions of a rank, and "
    "there are 2 forward passes that it may belong to: expected one backward pass after each",
    "dropout": "sequence_parallel=True, and 'body.blocks.1.up.base_layer' in a block has an "
    "adapter with dropout: expected lora_dropout=0.0, or sequence_parallel=False",
    "style": "sequence_parallel=True, and 'body.blocks.0.up' in a block is divided by "
    "'colwise_gather_output': expected pairs of 'colwise' and 'rowwise' there.",
    "no pair": "sequence_parallel=True, and 'body.blocks.0.up' in a block is not part of a pair of "
    "divided layers ('colwise', then 'rowwise'): choose another tensor_plan",
    "repeated": "sequence_parallel=True, and 'body.blocks' has the block 'body.blocks.0' 2 times, "
    "at 0, 2: the first and the last block of a sequence need to be called once. Expected separate",
    "shared": "sequence_parallel=True, and 'body.blocks.0.norm' in a block shares a parameter with "
    "a module outside of the blocks: pass sequence_parallel=False",
    "context": "context_modules has 'body.blocks.0', and with sequence_parallel=True the context "
    "axis divides sequences first: expected a module that has all the blocks, such as 'body'",
    "positions": "'body.blocks.1' (Block) computes something else when ranks divide its sequence: "
    "an output of shape (2, 12, 16) is off by ",
    "last block": "'body.blocks.2' (Block) was not called after the blocks before it: "
    "sequence_parallel=True joins the sequence at the end of the last block",
    "between": "'body.blocks.1' (Block) was called with hidden states of (2, 12, 16): expected the "
    "output of the block before, since sequence_parallel=True divides the sequence",
    "alone": "'body.blocks.1' (Block) was called with hidden states of (2, 12, 16): expected a "
    "call of the first one",
    "first tensor": "'body.blocks.0' (Block) was called with torch.float32 of (2, 16) as its first "
    "tensor: sequence_parallel=True divides hidden states of (batch, sequence, features)",
}
Ranks = list[dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("sequence")
    run_file(SCRIPT, str(folder), "2", folder=folder)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_evaluation_equal_one_process(case: str, ranks: Ranks) -> None:
    assert max(rank["numbers"][case] for rank in ranks) < 1e-10


def test_blocks_pass_on_a_part_of_the_hidden_states(ranks: Ranks) -> None:
    whole = 2 * 12 * 16
    assert ranks[0]["held"] == [whole, whole, whole, whole // 2, whole // 2, whole]


def test_dropout_of_parts_differs_between_ranks_and_the_common_numbers_go_on(ranks: Ranks) -> None:
    *first, number = ranks[0]["masks"]
    *second, other = ranks[1]["masks"]
    assert number == other
    for one, two in zip(first, second, strict=True):
        assert one[0] != two[0]
        assert one[1] != two[1]
    assert first[0] != first[1]


@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_divided_is_refused_on_every_rank(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["messages"][name].startswith(MESSAGES[name])


def test_cross_entropy_of_parts_equals_torchs_of_whole_logits(ranks: Ranks) -> None:
    for rank in ranks:
        losses = rank["losses"]
        for reduction in ("mean", "sum", "none"):
            whole = losses[f"{reduction} of cross_entropy"]
            assert losses[f"{reduction} of part"] == pytest.approx(whole, abs=1e-12)
            assert losses[f"gradients of {reduction}"] < 1e-10
        assert losses["by batch"] == pytest.approx(losses["mean of part"][0], abs=1e-12)
        assert losses["evaluation"] < 1e-12
        assert losses["bfloat16"] == "torch.bfloat16"


def test_each_rank_has_a_part_of_the_logits_in_training(ranks: Ranks) -> None:
    assert ranks[0]["losses"]["part"] == [2, 12, 8]


def test_targets_out_of_bounds_and_other_divided_dimensions_raise(ranks: Ranks) -> None:
    messages = ranks[0]["losses"]["messages"]
    assert messages["bounds"].endswith(": expected classes from 0 to 15")
    assert messages["dimension"].startswith(
        "cross_entropy received logits of (2, 12, 16) with (Shard(dim=2),) and a target of "
        "torch.int64: expected logits whose classes, dimension 1, are divided"
    )


def test_a_step_with_shards_or_a_context_axis_equals_one_process(tmp_path: Path) -> None:
    run_file(SCRIPT.with_name("tensor_sequence_mesh.py"), "found.json", folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for mesh in ("shard", "context"):
        assert found[mesh].pop("weights read back") == 0.0
        assert {"gradients", "gradient norm", "weights"} <= found[mesh].keys()
        assert max(found[mesh].values()) < 1e-10
