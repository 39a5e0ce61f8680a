"""Folders of transformers' models into every strategy and out again, and the models' own rules."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem import Lite
from stratagem.checkpoint import PretrainedWeights, save_pretrained
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_extras.pretrained.folder import INDEX, open_folder

peft: Any = pytest.importorskip("peft", reason="`nox -s huggingface` runs this")
transformers: Any = pytest.importorskip("transformers", reason="`nox -s huggingface` runs this")
pytest.importorskip("deepspeed", reason="`nox -s huggingface` runs this")

SCRIPT = Path(__file__).parent / "scripts" / "pretrained_transformers.py"
STRATEGIES = (
    *("single_device", "ddp", "ddp_sharded", "fsdp", "mesh"),
    *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
)
MODELS = ("llama", "llama, tied", "gpt2", "gemma3", "mistral")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model, as transformers writes it."""
    folder = tmp_path_factory.mktemp("models")
    run(folder, "write")
    return folder


def run(folder: Path, strategy: str) -> None:
    environment = {"PYTHONWARNINGS": "ignore"}
    run_file(SCRIPT, strategy, str(folder), folder=folder, env=environment)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_read_and_written_bit_for_bit(strategy: str, folder: Path) -> None:
    run(folder, strategy)
    found = json.loads((folder / f"{strategy}.json").read_text())
    assert list(found) == list(MODELS)
    for name in MODELS:
        assert found[name]["like"] == found[name]["bare"] == [], name
        assert {"config.json", "generation_config.json"} < set(found[name]["files"])
        tied = name in ("llama, tied", "gpt2", "gemma3")
        index = json.loads((folder / f"{name} from {strategy}/{INDEX}").read_text())
        assert ("lm_head.weight" in index["weight_map"]) is not tied


def saved(folder: Path, config: Any, kind: str = "AutoModelForCausalLM") -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config)
    model.save_pretrained(folder)
    return model


def test_a_base_model_and_a_new_head(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    whole = saved(tmp_path / "lm", config)
    whole.model.save_pretrained(tmp_path / "base")
    lite = Lite(accelerator="cpu")
    base = lite.setup(transformers.LlamaModel(config))
    with pytest.raises(CheckpointMismatchError, match=r"it has lm_head\.weight .64, 32."):
        lite.load_weights(base, tmp_path / "lm")
    lite.load_weights(base, PretrainedWeights(tmp_path / "lm", allow_unexpected=["lm_head.*"]))
    assert torch.equal(base.norm.weight, whole.model.norm.weight)
    assert torch.equal(base.embed_tokens.weight, whole.model.embed_tokens.weight)
    other = lite.setup(transformers.LlamaForSequenceClassification(config))
    with pytest.raises(CheckpointMismatchError) as refused:
        lite.load_weights(other, tmp_path / "base")
    assert refused.value.missing == ("score.weight",)
    lite.load_weights(other, PretrainedWeights(tmp_path / "base", allow_missing=["score.*"]))
    assert torch.equal(other.model.embed_tokens.weight, whole.model.embed_tokens.weight)


def test_adapters_of_peft_keep_their_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    whole = saved(tmp_path / "lm", config)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    before = {n: v.clone() for n, v in model.state_dict().items() if "lora_" in n}
    lite = Lite(accelerator="cpu")
    prepared = lite.setup(model)
    lite.load_weights(prepared, tmp_path / "lm")
    now = model.state_dict()
    assert before
    assert all(torch.equal(now[name], value) for name, value in before.items())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert torch.equal(layer.weight, whole.model.layers[0].self_attn.q_proj.weight)
    head = model.base_model.model.lm_head
    for copy in (head.original_module, head.modules_to_save["default"]):
        assert torch.equal(copy.weight, whole.lm_head.weight)


def test_magnitudes_of_dora_have_to_be_computed_from_the_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    saved(tmp_path / "lm", config)
    dora = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), dora)
    lite = Lite(accelerator="cpu")
    given = PretrainedWeights(tmp_path / "lm", allow_missing=["*magnitude*"])
    with pytest.raises(ConfigurationError, match="'default' is DoRA, which has computed its magni"):
        lite.load_weights(lite.setup(model), given)


def test_an_adapter_that_names_another_base_is_warned_of(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    for name in ("lm", "other"):
        saved(tmp_path / name, config)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "lm")
    made = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    lite = Lite(accelerator="cpu")
    model = lite.setup(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lite.load_weights(model, PretrainedWeights(tmp_path / "lm", adapter=tmp_path / "adapter"))
    other = PretrainedWeights(tmp_path / "other", adapter=tmp_path / "adapter")
    with pytest.warns(UserWarning, match="an adapter of another base computes something else"):
        lite.load_weights(model, other)


def test_former_names_follow_the_rules_of_transformers(tmp_path: Path) -> None:
    config = transformers.LlavaConfig(
        text_config={**SIZES, "model_type": "llama"},
        vision_config={
            **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64},
            **{"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8, "patch_size": 4},
        },
        image_token_index=3,
    )
    whole = saved(tmp_path / "in", config, "AutoModelForImageTextToText")
    names = set(open_folder(tmp_path / "in"))
    assert names != set(whole.state_dict()), "transformers writes the former names"
    lite = Lite(accelerator="cpu")
    model = transformers.AutoModelForImageTextToText.from_config(config)
    prepared = lite.setup(model)
    lite.load_weights(prepared, tmp_path / "in")
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[n]) for n, value in model.state_dict().items())
    save_pretrained(prepared, tmp_path / "out", like=tmp_path / "in")
    assert set(open_folder(tmp_path / "out")) == names


def test_models_that_merge_tensors_are_refused(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2)
    saved(tmp_path / "in", config)
    lite = Lite(accelerator="cpu")
    model = lite.setup(transformers.MixtralForCausalLM(config))
    with pytest.raises(ConfigurationError, match="makes its parameters of several tensors such as"):
        lite.load_weights(model, tmp_path / "in")
