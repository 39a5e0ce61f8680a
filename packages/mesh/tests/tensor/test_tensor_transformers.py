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


def run(folder: Path, *arguments: str) -> Any:
    environment = {"PYTHONWARNINGS": "ignore"}
    run_file(SCRIPT, str(folder), "2", *arguments, folder=folder, env=environment)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("sequence"), "sequence")


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


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "gemma3", "mistral"])
def test_gradients_with_parts_of_the_sequence_equal_one_process(name: str, parts: Any) -> None:
    assert max(parts[name]) < 1e-10


def test_hidden_states_of_each_block_are_refused_with_parts_of_the_sequence(parts: Any) -> None:
    assert parts["states"].startswith(
        "LlamaForCausalLM was called with output_hidden_states=True, and sequence_parallel=True "
        "gives each rank a part of them in training: expected output_hidden_states=False"
    )


LOSSES = {
    "logits": "logits are divided between the ranks that share a layer in training, since the "
    "model has computed the loss from them. To read them, pass MeshStrategy(gather_logits=True)",
    "own loss": "loss_parallel=True, but BertForMaskedLM has no model of transformers that "
    "computes its loss by loss_function: name the last layer in tensor_plan, such as {'head': "
    "'colwise_vocabulary'}, and compute the loss by stratagem_mesh.cross_entropy",
    "tokens": "loss_parallel=True, and 'lm_head' has 65 tokens, which do not divide between 2 "
    "ranks: call model.resize_token_embeddings(pad_to_multiple_of=2)",
    "tied": "loss_parallel=True, and 'lm_head' shares its weight with a layer that is not an "
    "embedding, so it is not divided",
    "function": "loss_parallel=True needs layers of known styles, and tensor_plan is a function",
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, tied", "gemma3"])
def test_losses_of_parts_of_the_logits_equal_one_process(name: str, parts: Any) -> None:
    assert max(parts[f"loss of {name}"]) < 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_need_whole_logits_are_refused(name: str, parts: Any) -> None:
    assert parts["messages"][name].startswith(LOSSES[name])
