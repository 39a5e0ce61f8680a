"""Checkpoints of meshes in one process, fsdp, DeepSpeed and other meshes, and theirs in meshes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts/mesh_checkpoints.py"
STAGES = ("pipeline 2 x shard 2", "pipeline 2 x tensor 2")
WRITERS = ("one process", "fsdp", "context 2", "shard 2 x tensor 2", *STAGES)
READERS = ("one process", "fsdp", "tensor 2", "context 2", "shard 2 x tensor 2", *STAGES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_file(SCRIPT, "found.json", folder=folder, timeout=400)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_weights_and_optimizer_state_are_read_bit_for_bit(
    writer: str, reader: str, differing: Any
) -> None:
    assert differing[writer][reader] == []


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: `nox -s tests`")
@pytest.mark.parametrize("writer", WRITERS)
def test_deepspeed_reads_weights_and_optimizer_state_bit_for_bit(
    writer: str, differing: Any
) -> None:
    assert differing[writer]["deepspeed_stage_3"] == []
