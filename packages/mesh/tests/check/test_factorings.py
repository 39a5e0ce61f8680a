"""Models of transformers, and a U-Net, on meshes of two and four ranks, beside one process."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

pytest.importorskip("transformers", reason="needs transformers: `nox -s huggingface` runs it")

SCRIPT = Path(__file__).parents[1] / "scripts/factorings.py"
FIRST, PIPELINES = ("llama", "gpt2", "whisper"), ("gpt2", "whisper", "mixtral", "unet")
MESHES = {
    "shard 2 x tensor 2": ("1,1,2,1,2", FIRST),
    "context 2 x tensor 2": ("1,1,1,2,2", FIRST),
    "pipeline 2": ("2,1,1,1,1", PIPELINES),
    "pipeline 2 x shard 2": ("2,1,2,1,1", PIPELINES),
    "pipeline 2 x tensor 2": ("2,1,1,1,2", PIPELINES),
    "pipeline 2 x context 2": ("2,1,1,2,1", PIPELINES),
}
"""The sizes and the models; the embedding and the head of gpt2 are tied."""
APART = {
    ("whisper", "context"): "attends from one sequence to another",
    ("unet", "context"): "no nn.TransformerEncoder, whose sequence the ranks would divide",
    ("unet", "tensor"): "no layer of UNet is divided",
}

pytestmark = pytest.mark.slow


def table(folder: Path, *arguments: str) -> Any:
    run_file(SCRIPT, *arguments, "--out", "found.json", folder=folder, timeout=400)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module", params=MESHES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("factorings")
    sizes, models = MESHES[request.param]
    ranks = str(prod(map(int, sizes.split(","))))
    rows = table(folder, ranks, "--models", *models, "--meshes", sizes)
    assert list(rows) == list(models)
    return request.param, {model: of_model[request.param] for model, of_model in rows.items()}


def test_a_step_has_the_numbers_of_one_process_or_is_refused(found: Any) -> None:
    mesh, of_models = found
    for model, said in of_models.items():
        refusals = [text for (name, axis), text in APART.items() if name == model and axis in mesh]
        if refusals:
            assert refusals[0] in said["refused"], model
        else:
            assert said.pop("gradients") < 1e-12, model
            assert max(said.values()) < 1e-12, model


@pytest.mark.parametrize(
    ("model", "mesh", "sizes"),
    [("llama", "context 2", "1,1,1,2,1"), ("gpt2", "pipeline 2", "2,1,1,1,1")],
)
def test_losses_of_fifty_steps_in_float32_equal_one_process(
    model: str, mesh: str, sizes: str, tmp_path: Path
) -> None:
    found = table(tmp_path, "2", "--models", model, "--meshes", sizes, "--steps", "50")
    assert found[model][mesh]["losses"] <= 1e-6
