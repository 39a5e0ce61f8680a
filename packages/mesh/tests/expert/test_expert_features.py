"""Each feature of the Trainer with experts on 4 ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/expert_features.py"
EXACT = (
    *("plain", "accumulate", "norm", "value", "manual", "frozen router", "frozen experts"),
    *("frozen before", "foreach", "unbalanced", "groups", "checkpointed", "experts checkpointed"),
    *("checkpointed, unbalanced", "resharded to 2", "kept", "replicas", "compiled", "average"),
)
Found = dict[str, Path]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("features")
    # The second run ends with the checkpoint that the first one has saved.
    for name, ranks in (("mesh", "4"), ("alone", "1")):
        run_file(SCRIPT, str(folder / name), ranks, folder=folder, timeout=400)
    return {name: folder / name for name in ("alone", "mesh")}


def weights(folder: Path, case: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"{case}.ckpt")["state_dict"]
    return state


def values(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "values.json").read_text())
    return read


@pytest.mark.parametrize("case", EXACT)
def test_weights_and_values_of_uneven_evaluations_equal_one_process(
    case: str, found: Found
) -> None:
    torch.testing.assert_close(
        weights(found["mesh"], case), weights(found["alone"], case), rtol=0, atol=1e-6
    )
    assert values(found["mesh"])[case] == pytest.approx(values(found["alone"])[case], abs=1e-6)


@pytest.mark.parametrize("case", ["bf16-true", "bf16-mixed"])
def test_weights_in_low_precision_are_close_to_one_process(case: str, found: Found) -> None:
    expected = weights(found["alone"], case)
    torch.testing.assert_close(weights(found["mesh"], case), expected, rtol=0, atol=0.1)
    assert values(found["mesh"])[case] == pytest.approx(values(found["alone"])[case], abs=0.03)


def test_an_evaluation_of_fewer_samples_than_ranks_equals_one_process(found: Found) -> None:
    few = values(found["alone"])["few"]
    assert values(found["mesh"])["few"] == pytest.approx(few, abs=1e-6)


def test_a_run_resumes_within_an_epoch_bit_for_bit(found: Found) -> None:
    assert values(found["mesh"])["resumed"] is True


def test_one_process_resumes_the_checkpoint_of_experts(found: Found) -> None:
    torch.testing.assert_close(
        weights(found["alone"], "from_other"), weights(found["alone"], "whole"), rtol=0, atol=1e-6
    )


def test_the_load_of_experts_is_logged_and_counts_the_tokens_of_a_step(found: Found) -> None:
    names = ["net.layers.0.experts", "net.layers.1.experts"]
    # All tokens go to the first of four experts: four times the mean.
    assert values(found["mesh"])["logged"] == {f"expert_load/{name}": 4.0 for name in names}
    # Two batches of a step, of 2 samples with 6 tokens; a repeated forward counts once.
    assert values(found["mesh"])["load"] == {name: [24, 0, 0, 0] for name in names}
