"""The comparison on a mesh with a planted mistake."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/mesh_plants.py"
FIRST = {
    "a gradient summed twice": ("gradients", "norm.0.bias"),
    "a gradient summed over a sequence": ("gradients", "positions.weight"),
    "a gradient of a part": ("gradients", "attention.norm.bias"),
    "a norm counted twice": ("gradient norm", ""),
    "numbers of other seeds": ("outputs of modules", "norm.1"),
    "a mask dropped": ("outputs of modules", "encoder"),
    "labels cut before the shift": ("outputs of modules", "scores"),
    "a tied weight divided twice": ("gradients", "embedding.weight"),
    "expert gradients too large": ("gradients", "layers.1.experts.down"),
    "the gradient of a tied weight lost": ("gradients", "embedding.weight"),
    "a boundary lost": ("outputs of modules", "up"),
    "a tied weight summed twice": ("gradients", "embedding.weight"),
    "a micro-batch dropped": ("loss", ""),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plants")
    run_file(SCRIPT, "found.json", folder=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("subject", ["tensor", "tied", "context", "labels", "experts", "stages"])
def test_without_a_mistake_nothing_differs(subject: str, found: Any) -> None:
    assert found["said"][f"nothing, {subject}"] == {}


@pytest.mark.parametrize("mistake", FIRST)
def test_the_first_quantity_that_differs_names_the_mistake(mistake: str, found: Any) -> None:
    assert next(iter(found["said"][mistake].items())) == FIRST[mistake]


def test_the_gradients_of_a_pipeline_without_a_micro_batch_differ(found: Any) -> None:
    said = found["said"]["a micro-batch dropped"]
    assert said["gradients"] == said["weights"] == "down.bias"
    assert "outputs of modules" not in said


@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: `nox -s huggingface` runs it"
)
def test_labels_of_a_model_of_transformers_are_shifted_before_the_cut(found: Any) -> None:
    assert found["said"]["nothing, transformers"] == {}
    said = found["said"]["labels of transformers cut before the shift"]
    assert next(iter(said)) == "loss"
    assert "gradients" in said


def test_a_mask_that_is_dropped_is_refused_in_the_first_forward_pass(found: Any) -> None:
    (error,) = found["said"]["a mask dropped, checked"].items()
    assert error[0] == "RankFailedError"
    assert "'encoder' (TransformerEncoder) computes something else when ranks divide" in error[1]


@pytest.mark.parametrize("axis", ["features", "positions"])
def test_a_shared_seed_repeats_the_dropout_of_another_rank(axis: str, found: Any) -> None:
    assert found["seeds"]["shared"][axis]
    assert not found["seeds"]["own"][axis]
