"""Stages of models of transformers in turn, which are unmodified, tiny and random."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pipeline_transformers.py"
MODELS = {
    "GPT-2": 6,
    "BERT": 6,
    "Llama": 6,
    "ViT": 6,
    "T5": 9,
    "Whisper": 6,
    "CLIP": 4,
    "Mixtral": 6,
    "Qwen3-MoE": 6,
}
"""The number of divisions of each."""

FEATURES = {
    "checkpointed": "equal",
    "reentrant": "ConfigurationError: the module 'model.layers.0' is called by ",
    "dropout": "equal",
    "cache": "UserCodeError: the model was called with a DynamicCache, of which each stage of a "
    "pipeline has the entries of its own layers alone: pass use_cache=False",
    "generated": "equal",
    "hidden states": "equal",
    "router": "ConfigurationError: user code reads a tensor of the module 'model.layers.1' of "
    "stage 0 that the module does not return, and stage 1 cannot receive it",
    "adapters": "equal",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    pytest.importorskip("transformers", reason="needs transformers: `nox -s huggingface` runs it")
    folder = tmp_path_factory.mktemp("stages")
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    written: dict[str, dict[str, str]] = json.loads((folder / "out.json").read_text())
    return written


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_outputs_equal_the_whole_model(
    name: str, out: dict[str, dict[str, str]]
) -> None:
    found = out["models"][name]
    assert len(found) == MODELS[name]
    assert set(found.values()) == {"equal"}, found  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_equal_or_refused(name: str, out: dict[str, dict[str, str]]) -> None:
    assert out["features"][name].startswith(FEATURES[name])
