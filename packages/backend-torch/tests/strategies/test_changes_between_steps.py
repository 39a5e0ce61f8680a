"""Callbacks that change or freeze weights have the effect that they have in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts" / "changes_between_steps.py"
Weights = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights after training, by strategy and case."""
    folder = tmp_path_factory.mktemp("changes")
    for strategy, ranks in (("single_device", 1), ("ddp", 2), ("fsdp", 2)):
        run_file(SCRIPT, strategy, str(ranks), folder=folder)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_changes_between_steps_train_the_weights_of_one_process(
    strategy: str, weights: Weights
) -> None:
    expected = dict(weights["single_device"])
    assert weights[strategy].keys() == expected.keys()
    assert len(expected) == 34
    for case, numbers in expected.items():
        assert weights[strategy][case] == pytest.approx(numbers, rel=0, abs=1e-6), case
    unchanged, logged = expected.pop("unchanged"), expected["norm logged"]
    assert len(logged) == len(unchanged) + 1
    assert unchanged not in expected.values()


@pytest.mark.slow
def test_parameters_that_no_rank_would_average_are_refused(tmp_path: Path) -> None:
    done = run_file(SCRIPT, "ddp_added", "2", folder=tmp_path, expect=1)
    said = "the parameter 'extra.weight' was added after the strategy 'DDPStrategy' prepared the"
    assert said in done.stderr


@pytest.mark.slow
def test_parameters_that_ddp_still_waits_for_are_named(tmp_path: Path) -> None:
    """A model is frozen in part after DDP was made, and trains on without unused parameters."""
    done = run_file(SCRIPT, "ddp_plain", "2", folder=tmp_path, expect=1)
    frozen = "backbone.0.weight (frozen since DDP was made), backbone.0.bias (frozen since DDP was"
    assert f"unused: {frozen}" in done.stderr
    assert "head" not in done.stderr.partition("unused: ")[2].partition(". Let")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "decaying",
            "the parameter 'head.weight' was changed between the forward and the backward",
        ),
        ("replace_data", "the sharded parameter 'head.weight', or its `.data`, was replaced"),
        ("replace_parameter", "the sharded parameter 'head.weight', or its `.data`, was replaced"),
        (
            "add_plain_tensor",
            "a sharded parameter (a DTensor) was used where a whole tensor is needed",
        ),
        ("read_storage", "read or save whole weights as parameter.full_tensor(), on every rank"),
        ("set_item", "or convert a plain tensor by torch.distributed.tensor.distribute_tensor("),
        ("read_as_numpy", "read or save whole weights as parameter.full_tensor(), on every rank"),
        ("call_layer", "Call the model itself rather than its layers, under torch.no_grad()"),
    ],
)
def test_changes_that_fsdp_would_lose_are_refused(case: str, expected: str, tmp_path: Path) -> None:
    done = run_file(SCRIPT, case, "2", folder=tmp_path, expect=1)
    assert expected in done.stderr
