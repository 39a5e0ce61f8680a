"""State of a model in stages: what is saved and loaded, beside one process, and a rank's bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

SCRIPTS = Path(__file__).parents[1] / "scripts"
EQUAL = (
    *("resumed_average", "validated", "best", "groups"),
    *("folder", "trained_from", "trained_only"),
)
OF_PEFT = ("adapter", "merged")
REFUSED = {
    "averaged": "StochasticWeightAveraging needs whole weights on each rank, and 'PipelineMesh' "
    "shards them: use EMAWeightAveraging or WeightAveraging, which average shards",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("state")
    cases = [*EQUAL, *REFUSED, *(OF_PEFT if find_spec("peft") else ())]
    for name, ranks in ("alone", "1"), ("pipeline", "2"):
        script = SCRIPTS / "pipeline_state.py"
        run_file(script, str(folder / name), ranks, *cases, folder=folder, timeout=400)
    return {
        f"{name}, {case}": torch.load(folder / name / f"{case}.pt")
        for name in ("alone", "pipeline")
        for case in cases
    }


def assert_equal(case: str, found: dict[str, Any]) -> None:
    expected, own = found[f"alone, {case}"], found[f"pipeline, {case}"]
    assert "error" not in expected
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", EQUAL)
def test_state_of_stages_equals_one_process(case: str, found: dict[str, Any]) -> None:
    assert_equal(case, found)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: `nox -s huggingface` runs it")
@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_of_stages_are_written_as_in_one_process(case: str, found: dict[str, Any]) -> None:
    assert_equal(case, found)


@pytest.mark.parametrize("case", REFUSED)
def test_averages_of_whole_models_are_refused(case: str, found: dict[str, Any]) -> None:
    assert REFUSED[case] in found[f"pipeline, {case}"]["error"]


def test_the_parameters_of_a_rank_are_an_eighth_of_the_model_and_tied_weights(
    tmp_path: Path,
) -> None:
    run_file(SCRIPTS / "pipeline_bytes.py", "found.json", folder=tmp_path, timeout=200)
    said = json.loads((tmp_path / "found.json").read_text())
    share = (said["whole"] - said["tied"]) // 8 + said["tied"]
    for of_rank in said["ranks"]:
        assert of_rank.pop("moments") == share
        assert sum(of_rank.values()) == share
