"""Each feature of the Trainer on meshes of data 2 x tensor 2 and pipeline 2 x data 2.

Each is compared with one process.
"""

from __future__ import annotations

import json
from itertools import product
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
AXES = ("tensor", "pipeline")
Found = dict[str, Path]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("features")
    # A run of one process resumes the checkpoint of the mesh, and the other way around.
    for name, *arguments in (
        ("tensor", "4", "tensor"),
        ("alone", "1", "tensor", "tensor"),
        ("pipeline", "4", "pipeline"),
        ("of pipeline", "1", "tensor", "pipeline"),
    ):
        run_file(SCRIPT, str(folder / name), *arguments, folder=folder, timeout=400)
    return {name: folder / name for name in ("alone", "of pipeline", *AXES)}


def weights(folder: Path, case: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"{case}.ckpt")["state_dict"]
    return state


def values(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "values.json").read_text())
    return read


@pytest.mark.parametrize(
    ("axis", "case"), [each for each in product(AXES, EXACT) if each != ("pipeline", "manual")]
)
def test_weights_and_logged_values_equal_one_process(axis: str, case: str, found: Found) -> None:
    torch.testing.assert_close(
        weights(found[axis], case), weights(found["alone"], case), rtol=0, atol=1e-6
    )
    assert values(found[axis])[case] == pytest.approx(values(found["alone"])[case], abs=1e-6)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("case", ["bf16-true", "bf16-mixed"])
def test_weights_in_low_precision_are_close_to_one_process(
    axis: str, case: str, found: Found
) -> None:
    expected = weights(found["alone"], case)
    torch.testing.assert_close(weights(found[axis], case), expected, rtol=0, atol=0.1)
    assert values(found[axis])[case] == pytest.approx(values(found["alone"])[case], abs=0.01)


@pytest.mark.parametrize("axis", AXES)
def test_predictions_equal_one_process(axis: str, found: Found) -> None:
    assert values(found[axis])["predictions"] == values(found["alone"])["predictions"]


@pytest.mark.parametrize("axis", AXES)
def test_a_run_resumes_within_an_epoch_bit_for_bit(axis: str, found: Found) -> None:
    assert values(found[axis])["resumed"] is True


@pytest.mark.parametrize("reader", ["alone", "of pipeline"])
def test_one_process_resumes_the_checkpoint_of_a_mesh(reader: str, found: Found) -> None:
    torch.testing.assert_close(
        weights(found[reader], "from_other"), weights(found[reader], "whole"), rtol=0, atol=1e-6
    )
