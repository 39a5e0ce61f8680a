"""The context axis: what ranks compute that share a sequence, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPTS = Path(__file__).parents[1] / "scripts"

Ranks = list[dict[str, Any]]

CASES = [
    "encoder",
    "causal",
    "padding",
    "causal, padding",
    "odd",
    "sequence first",
    "three heads",
    "three heads, causal",
    "short",
    "by name",
    "one key head",
    "mask of the user",
    "keys of the user",
    "causal mask of a part",
    "checkpointed",
    "checkpointed, short",
    "checkpointed, padding",
]

ADVICE = (
    " Something in it reads positions of other ranks otherwise than by "
    "scaled_dot_product_attention, or counts positions by itself: name in context_modules the "
    "modules that do not, or pass context=1"
)

REFUSED = {
    "differs": "UserCodeError: 'body' (Body) computes something else when ranks divide its "
    "sequence: an output of shape (3, 16, 16) is off by ",
    "window": "UserCodeError: 'body' (Body) made a mask of shape ({0}, {0}) from its part of the "
    "sequence, which says nothing of the other parts: expected a mask of 16 x 16 positions as an "
    "input of the module, or is_causal=True in scaled_dot_product_attention",
    "bias": "UserCodeError: 'body' (Body) adds a learned bias to attention scores, whose gradient "
    "is that of a part: context parallelism cannot divide it; pass context=1",
    "half": "UserCodeError: 'body' (Body) attends from {0} to {1} positions in 4 dimensions: "
    "expected {0} and {0}, the part of a rank, in 3 or more. Attention between two sequences, or "
    "over part of one, cannot be divided here: leave the module out of context_modules",
    "mean": "UserCodeError: 'body' (Body) returned a tensor of shape (3, 16): expected (batch, "
    "sequence, ...) with {0} positions, the part of a rank, which are joined. Name in "
    "context_modules the modules inside of it that return sequences",
    "square": "UserCodeError: 'body' (Body) was called with a torch.bool tensor of 12 x 12, which "
    "is either a mask of the sequence or one entry for each position of the batch: expected a "
    "batch of another size than the sequence, or a mask of 4 dimensions",
    "masks": "UserCodeError: activation checkpointing recomputes a layer of {0} positions, and "
    "there are 2 different forward passes that it may belong to: expected one backward pass after "
    "each forward pass with a mask. Call manual_backward for each, pass the same mask to both, or "
    "train without activation checkpointing",
    "nothing": "ConfigurationError: context={2}, but Flatten has no model of transformers and no "
    "nn.TransformerEncoder, whose sequence the ranks would divide: pass context_modules=['NAME'] "
    "of a module that reads (batch, sequence, ...) and attends by scaled_dot_product_attention, "
    "or context=1",
    "missing": "ConfigurationError: context_modules has 'bodies', which Model does not have: "
    "expected names of modules, such as 'words', 'bias', 'body', 'body.layers', 'body.layers.0'",
    "nested": "ConfigurationError: context_modules has 'body' and 'body.layers.0' inside of it, "
    "whose sequence is divided already: expected one of them",
    "convolution": "ConfigurationError: context parallelism divides '0' (Sequential) along the "
    "sequence, and '0.0' in it is a Conv1d, which reads several positions: name in "
    "context_modules the modules without such layers, or pass context=1",
    "no sequence": "UserCodeError: '0' (Linear) was called without a tensor of (batch, sequence, "
    "...): expected one, whose sequence is divided; leave the module out of context_modules",
}


def run(script: str, ranks: int, folder: Path) -> Ranks:
    # The time is for a hang: four ranks take 60 s of CPU, whatever else runs.
    run_file(SCRIPTS / script, str(ranks), folder=folder, timeout=400)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("out*.json"))]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp(f"context{request.param}")
    return run("context_numbers.py", request.param, folder)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_evaluation_are_those_of_one_process(name: str, ranks: Ranks) -> None:
    assert set(ranks[0]["differences"]) == set(CASES)
    for rank in ranks:
        assert rank["differences"][name] < 1e-12


def test_gradients_of_the_collectives_are_those_of_one_process(ranks: Ranks) -> None:
    for rank in ranks:
        assert max(rank["derivatives"].values()) < 1e-12


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_divided_is_refused_on_every_rank(name: str, ranks: Ranks) -> None:
    assert set(ranks[0]["messages"]) == set(REFUSED)
    size = len(ranks)
    expected = REFUSED[name].format(16 // size, 8 // size, size)
    for rank in ranks:
        assert rank["messages"][name].startswith(expected)
    if name == "differs":
        assert ranks[0]["messages"][name].endswith(ADVICE)


def test_dropout_differs_between_parts_and_ranks_draw_the_same_afterwards(ranks: Ranks) -> None:
    for rank in ranks:
        assert not rank["dropout"]["parts are equal"]
        assert rank["dropout"] == ranks[0]["dropout"]
        assert not rank["dropout"]["evaluation draws"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("context_training.py", 1, tmp_path_factory.mktemp("reference"))[0]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp(f"training{request.param}")
    return run("context_training.py", request.param, folder)


RUNS = ["encoder", "checkpointed", "compiled", "by name", "by name, checkpointed"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_losses_logs_and_predictions_of_one_process(
    name: str, trained: Ranks, reference: dict[str, Any]
) -> None:
    expected = reference[name]
    for rank in trained:
        assert rank[name]["losses"] == pytest.approx(expected["losses"], abs=1e-6, rel=0)
        assert rank[name]["logged"] == pytest.approx(expected["logged"], abs=1e-6, rel=0)
    # One of the two ranks of each sequence.
    predicted = sum(rank[name]["predicted"] for rank in trained[::2])
    assert predicted == pytest.approx(expected["predicted"], rel=1e-6)


@pytest.mark.parametrize("name", ["and tensor", "and replicas"])
def test_sequences_are_divided_along_with_other_axes(
    name: str, trained: Ranks, reference: dict[str, Any]
) -> None:
    expected = reference["encoder"]
    for rank in trained:
        found = rank[name] if len(trained) == 4 else rank["encoder"]
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6, rel=0)
        assert found["logged"] == pytest.approx(expected["logged"], abs=1e-6, rel=0)
