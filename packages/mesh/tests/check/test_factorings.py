"""Models of transformers on meshes of four ranks with two axes each, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

pytest.importorskip("transformers", reason="needs transformers: `nox -s huggingface` runs it")

SCRIPT = Path(__file__).parents[1] / "scripts/factorings.py"
MESHES = {
    "shard 2 x tensor 2": "1,1,2,1,2",
    "context 2 x tensor 2": "1,1,1,2,2",
    "shard 2 x context 2": "1,1,2,2,1",
    "replicate 2 x tensor 2": "1,2,1,1,2",
}

pytestmark = pytest.mark.slow


def table(folder: Path, *arguments: str) -> Any:
    run_file(SCRIPT, *arguments, "--out", "found.json", folder=folder, timeout=400)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("factorings")
    return table(folder, "4", "--models", "llama", "gpt2", "whisper", "--meshes", *MESHES.values())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["llama", "gpt2", "whisper"])
def test_a_step_has_the_numbers_of_one_process_or_is_refused(
    model: str, mesh: str, found: Any
) -> None:
    said = dict(found[model][mesh])
    if model == "whisper" and "context" in mesh:
        assert "attends from one sequence to another" in said["refused"]
    else:
        assert said.pop("gradients") < 1e-12
        assert max(said.values()) < 1e-12


def test_losses_of_fifty_steps_in_float32_equal_one_process(tmp_path: Path) -> None:
    found = table(tmp_path, "2", "--models", "llama", "--meshes", "1,1,1,2,1", "--steps", "50")
    assert found["llama"]["context 2"]["losses"] <= 1e-6
