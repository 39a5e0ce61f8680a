"""Stages whose units are sharded by FSDP2 over two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/pipeline_sharded.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    run_file(SCRIPT, folder=folder)
    written: dict[str, Any] = json.loads((folder / "out0.json").read_text())
    return written


@pytest.mark.parametrize("name", ["encoder 1", "encoder 2", "residual"])
def test_losses_and_gradients_equal_the_whole_model(name: str, out: dict[str, Any]) -> None:
    assert out[name]["loss"] < 1e-12
    assert out[name]["gradients"] < 1e-10
    assert out[name]["dtypes"] == ["torch.float64"]


@pytest.mark.parametrize("name", ["encoder 1", "encoder 2", "residual", "parts"])
def test_a_stage_gathers_the_parameters_of_its_own_units(name: str, out: dict[str, Any]) -> None:
    """Also where the rank has another stage, whose units stand in."""
    assert out[name]["unsharded by stage 0"] == [0]
    assert out[name]["unsharded"] >= 4


def test_values_have_the_type_of_mixed_precision(out: dict[str, Any]) -> None:
    assert out["parts"]["dtypes"] == ["torch.bfloat16"]
    assert out["parts"]["loss"] < 0.02
