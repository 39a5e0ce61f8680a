"""Training as users do it, on two stages: logged values, callbacks, optimizers, Lite, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/pipeline_training.py"
STEPS = "loss_step"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The values of one process, and of each rank of two stages."""
    folder = tmp_path_factory.mktemp("training")
    for ranks in ("1", "2"):
        run_file(SCRIPT, str(folder / ranks), ranks, folder=folder, timeout=400)
    files = (folder / "1/0.json", folder / "2/0.json", folder / "2/1.json")
    return [json.loads(file.read_text()) for file in files]


def test_logged_values_callbacks_and_predictions_equal_one_process(
    found: list[dict[str, Any]],
) -> None:
    """The values of single steps are on the ranks of the last stage alone."""
    alone, last, first = (of_rank["logged"] for of_rank in found)
    assert last[0] == pytest.approx(alone[0], abs=1e-6)
    assert first[0] == pytest.approx({k: v for k, v in alone[0].items() if k != STEPS}, abs=1e-6)
    for of_rank in (last, first):
        assert of_rank[1] == alone[1]
        assert Path(of_rank[2]).name == Path(alone[2]).name
        assert of_rank[3] == alone[3]


def test_an_optimizer_of_the_last_layer_leaves_nothing_to_the_first_stage(
    found: list[dict[str, Any]],
) -> None:
    alone, last, _ = (of_rank["head_alone"] for of_rank in found)
    assert last == pytest.approx(alone, abs=1e-6)


def test_groups_by_name_have_a_tied_weight_as_in_one_process(found: list[dict[str, Any]]) -> None:
    alone, *ours = (of_rank["tied"] for of_rank in found)
    for logged, groups in ours:
        assert logged == pytest.approx(alone[0], abs=1e-6)
        assert groups == alone[1] == [6, 1]


def test_a_strategy_fits_twice_and_releases_each_model(found: list[dict[str, Any]]) -> None:
    alone, last, first = (of_rank["twice"] for of_rank in found)
    for ours, expected in zip(last[0], alone[0], strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)
    assert last[1] == first[1] == [True, True]


def test_a_loop_of_lite_equals_one_process(found: list[dict[str, Any]]) -> None:
    alone, *ours = (of_rank["own_loop"] for of_rank in found)
    for losses, outputs, _ in ours:
        assert losses == pytest.approx(alone[0], abs=1e-6)
        for row, expected in zip(outputs, alone[1], strict=True):
            assert row == pytest.approx(expected, abs=1e-6)


def test_user_code_that_runs_backward_or_has_no_loss_is_refused_on_each_rank(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found[1:]:
        said = of_rank["own_loop"][2]
        assert said["backward"] == (
            "ConfigurationError: the strategy 'PipelineMesh' runs backward itself "
            "(manual_backward=False in its capabilities), so that a loop of your own cannot train "
            "with it: use lite.step, the Trainer, or another strategy"
        )
        assert said["forward"] == (
            "UserCodeError: Net.forward() was called outside of a step, in training mode, and the "
            "stages of a pipeline train together: call lite.step(model, micro_batches, loss) with "
            "the call in loss, or model.eval() under torch.no_grad()"
        )
        assert said["nothing"] == (
            "UserCodeError: training_step returned None, which skips the micro-batch, and the "
            "other stages wait for its gradients: return a loss for each micro-batch, such as 0.0 "
            "times an output"
        )
        assert of_rank["refused"] == (
            "ConfigurationError: Manual has automatic_optimization = False, and the strategy "
            "'PipelineMesh' runs backward itself: use automatic optimization, and one "
            "optimizer with parameter groups"
        )


def test_a_new_strategy_trains_the_stages_of_an_earlier_one(found: list[dict[str, Any]]) -> None:
    alone, last, first = (of_rank["again"] for of_rank in found)
    assert last[0] == pytest.approx(alone[0], abs=1e-6)
    assert first[0] == pytest.approx({k: v for k, v in alone[0].items() if k != STEPS}, abs=1e-6)
    for said in (last[1], first[1]):
        assert said == (
            "ConfigurationError: Net was divided into 2 stages before, and pipeline=2 x "
            "virtual_stages=2 is 4: expected the same sizes, or a new model"
        )


def test_statistics_resume_and_errors_of_user_code_keep_their_text(
    found: list[dict[str, Any]],
) -> None:
    alone, last, first = (of_rank["resumed"] for of_rank in found)
    assert last[0] == pytest.approx(alone[0], abs=1e-6)
    assert first[0] == pytest.approx({k: v for k, v in alone[0].items() if k != STEPS}, abs=1e-6)
    assert alone[1] == last[1] == first[1] == "RuntimeError: planted"
