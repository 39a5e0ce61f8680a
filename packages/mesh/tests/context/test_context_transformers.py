"""The context axis in models of transformers, which are unmodified, tiny and random."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "context_transformers.py"

MODELS = [
    "GPT-2",
    "BERT",
    "BERT, classes of tokens",
    "BERT, classes of texts",
    "RoBERTa",
    "Llama",
    "Llama, three heads",
    "Qwen3",
    "Gemma 3",
    "Mistral",
]
BATCHES = ["ragged labels", "left", "right", "packed", "items", "checkpointed"]

REFUSED = {
    "T5": "ConfigurationError: context parallelism divides one sequence, and '0' (T5Model) "
    "attends from one sequence to another: pass context=1, and use tensor or shard",
    "Whisper": "ConfigurationError: context parallelism divides one sequence, and '0' "
    "(WhisperModel) attends from one sequence to another: pass context=1, and use tensor or shard",
    "ViT": "ConfigurationError: context parallelism divides a sequence of input_ids, and '0' "
    "(ViTModel) reads pixel_values: pass context=1, or name its layers, which read (batch, "
    "sequence, features): context_modules=['layers.*'], where * stands for a number",
    "eager": "ConfigurationError: '0' (LlamaForCausalLM) computes attention by 'eager', and "
    "context parallelism by 'sdpa' alone: pass attn_implementation='sdpa' to from_pretrained or "
    "from_config, or call model.set_attn_implementation('sdpa')",
    "attentions": "UserCodeError: '0' (LlamaForCausalLM) was called with output_attentions=True, "
    "and each rank computes attention of a part: expected output_attentions=False, or context=1",
    "other outputs": "UserCodeError: '0' (MixtralForCausalLM) returned 'aux_loss', which context "
    "parallelism cannot join from the parts of ",
    "one dimension": "UserCodeError: '0' (LlamaForCausalLM) received input_ids of shape (27,), and "
    "context parallelism divides its sequence: expected (batch, sequence)",
    "mask function": "UserCodeError: '0' (LlamaForCausalLM) passes or_mask_function to "
    "create_causal_mask, which reads a part of the sequence: context parallelism cannot divide its "
    "mask; pass context=1",
    "logits": "UserCodeError: logits are divided between the ranks of a sequence in training, "
    "since the model has computed the loss from them. To read them, pass "
    "MeshStrategy(gather_logits=True), which gives each rank all of them",
    "two sequences": "UserCodeError: '0' (BertModel) was called with encoder_hidden_states, a "
    "second sequence: context parallelism divides one; pass context=1",
    "positions": "UserCodeError: '0' (OPTForCausalLM) computes something else when ranks divide "
    "its sequence: an output of shape (",
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers", reason="needs transformers: `nox -s huggingface` runs it")
    folder = tmp_path_factory.mktemp(f"transformers{request.param}")
    command = [sys.executable, str(SCRIPT), str(request.param)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    written: dict[str, Any] = json.loads((folder / "out0.json").read_text())
    return written


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_losses_gradients_and_evaluation_of_models_are_those_of_one_process(
    name: str, batch: str, out: dict[str, Any]
) -> None:
    assert max(out["differences"][name][batch].values()) < 1e-10


def test_other_outputs_are_those_of_one_process(out: dict[str, Any]) -> None:
    others = dict(out["others"])
    assert others.pop("generated is equal")
    assert set(others) == {"hidden states", "logits", "images", "a loss of no label"}
    assert max(others.values()) < 1e-12


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_cannot_be_divided_are_refused(name: str, out: dict[str, Any]) -> None:
    assert out["messages"][name].startswith(REFUSED[name])
