"""Models of transformers, unmodified, divided between two ranks, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

for library in ("transformers", "peft"):
    pytest.importorskip(library, reason=f"needs {library}: `nox -s huggingface` runs it")

SCRIPT = Path(__file__).parents[1] / "scripts/tensor_language.py"
SHARES = {
    "gpt2": 0.8,
    "bert": 0.7,
    "llama": 0.98,
    "llama, tied": 0.98,
    "gpt2, LoRA": 0.6,
    "llama, LoRA": 0.6,
    "qwen3": 0.98,
    "gemma3": 0.98,
    "mistral": 0.98,
    "vit": 0.8,
    "whisper": 0.8,
    "t5": 0.3,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("language")
    run_file(SCRIPT, str(folder), "2", folder=folder, env={"PYTHONWARNINGS": "ignore"})
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", SHARES)
def test_loss_and_gradients_equal_one_process(name: str, found: Any) -> None:
    loss, gradient = found[name]["torch.float32"]
    assert loss < 1e-6
    assert gradient < 1e-3
    loss, gradient = found[name]["torch.float64"]
    assert loss < 1e-6 if name == "gemma3" else loss < 1e-12
    # The norms of Gemma compute in float32.
    assert gradient < (1e-6 if name == "gemma3" else 1e-10)
    assert found[name]["share"] > SHARES[name]


def test_tied_weights_stay_one_parameter(found: Any) -> None:
    assert found["llama, tied"]["tied"] is True
    assert found["gpt2"]["tied"] is True
    assert found["llama, tied"]["layers"]["lm_head"] == "colwise_gather_output"
    assert "lm_head" not in found["gpt2"]["layers"]
