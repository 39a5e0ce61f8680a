"""Checkpoints of experts, in other meshes and strategies."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/expert_checkpoints.py"
WRITERS = (
    *("one process", "expert 2", "expert 4", "expert 2 x shard 2", "expert 2 x replicate 2"),
    "pipeline 2 x expert 2",
)
READERS = ("fsdp", *WRITERS, *(["deepspeed_stage_3"] if find_spec("deepspeed") else []))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_file(SCRIPT, "found.json", folder=folder, timeout=400)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_weights_and_optimizer_state_are_read_bit_for_bit(
    writer: str, reader: str, found: Any
) -> None:
    assert found["differing"][writer][reader] == []


def test_a_checkpoint_has_names_and_shapes_of_one_process(found: Any) -> None:
    assert set(found["shapes"].values()) == {True}
