"""Each feature of the Trainer on a mesh of data 2 x tensor 2, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts/mesh_features.py"
EXACT = (
    *("plain", "accumulate", "norm", "value", "frozen", "manual", "checkpointed", "replicas"),
    *("average", "compiled"),
)
Found = dict[str, Path]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("features")
    # The first run ends with the checkpoint that the second one resumes, and the other way around.
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
def test_weights_and_logged_values_equal_one_process(case: str, found: Found) -> None:
    torch.testing.assert_close(
        weights(found["mesh"], case), weights(found["alone"], case), rtol=0, atol=1e-6
    )
    assert values(found["mesh"])[case] == pytest.approx(values(found["alone"])[case], abs=1e-6)


@pytest.mark.parametrize("case", ["bf16-true", "bf16-mixed"])
def test_weights_in_low_precision_are_close_to_one_process(case: str, found: Found) -> None:
    expected = weights(found["alone"], case)
    torch.testing.assert_close(weights(found["mesh"], case), expected, rtol=0, atol=0.1)
    assert values(found["mesh"])[case] == pytest.approx(values(found["alone"])[case], abs=0.01)


def test_predictions_equal_one_process(found: Found) -> None:
    assert values(found["mesh"])["predictions"] == values(found["alone"])["predictions"]


def test_a_run_resumes_within_an_epoch_bit_for_bit(found: Found) -> None:
    assert values(found["mesh"])["resumed"] is True


def test_one_process_resumes_the_checkpoint_of_a_mesh(found: Found) -> None:
    torch.testing.assert_close(
        weights(found["alone"], "from_other"), weights(found["alone"], "whole"), rtol=0, atol=1e-6
    )
