"""Adapters of PEFT: trained, written, read, merged; in `nox -s huggingface`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch.utils.data import DataLoader

from stratagem import Lite, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import PretrainedWeights, save_pretrained
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
)
from stratagem_extras.checkpoints.weights import convert
from stratagem_extras.language import LanguageModule

peft: Any = pytest.importorskip("peft", reason="`nox -s huggingface` runs this")
transformers: Any = pytest.importorskip("transformers", reason="`nox -s huggingface` runs this")
load_file = pytest.importorskip("safetensors.torch").load_file

SCRIPT = Path(__file__).parent / "scripts" / "adapters.py"
STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_3", "mesh", "mesh_tensor")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TARGETS = ["q_proj", "down_proj"]
LORA = partial(peft.LoraConfig, r=4, target_modules=TARGETS)
KINDS: dict[str, Any] = {
    "lora": LORA,
    "modules to save": partial(LORA, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "dora": partial(LORA, use_dora=True),
    "rslora": partial(LORA, use_rslora=True, rank_pattern={"q_proj": 2}),
    "all linear": partial(LORA, target_modules="all-linear"),
    "embeddings": partial(LORA, target_modules=["embed_tokens", "q_proj"]),
    "tokens": partial(LORA, trainable_token_indices=[1, 2]),
    "biases": partial(LORA, bias="all"),
    "ia3": partial(peft.IA3Config, target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": partial(peft.VeraConfig, r=4, target_modules=["q_proj", "o_proj"]),
    "vera, projections left out": partial(
        peft.VeraConfig, r=4, target_modules=["q_proj", "o_proj"], save_projection=False
    ),
    "loha": partial(peft.LoHaConfig, r=4, target_modules=TARGETS),
    "lokr": partial(peft.LoKrConfig, r=4, target_modules=TARGETS),
    "oft": partial(peft.OFTConfig, oft_block_size=8, target_modules=TARGETS),
    "adalora": partial(peft.AdaLoraConfig, total_step=10, target_modules=TARGETS),
}
IDS = torch.arange(16).reshape(2, 8)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


def base(seed: int = 0, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))


def adapted(config: Any, seed: int = 0, **sizes: Any) -> Any:
    """A model whose adapters change its output."""
    model = peft.get_peft_model(base(seed, **sizes), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def prepared(model: Any) -> tuple[Lite, Any]:
    lite = Lite(accelerator="cpu")
    return lite, lite.setup(model)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits.detach()
    return found


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    return found


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(found.get("target_modules"), list):
        found["target_modules"] = sorted(found["target_modules"])  # a set for PEFT
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# -- one process


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_an_adapter_equal_the_files_of_peft(kind: str, tmp_path: Path) -> None:
    model = adapted(KINDS[kind]())
    model.save_pretrained(tmp_path / "peft")
    save_pretrained(prepared(model)[1], tmp_path / "own")
    assert same(read(tmp_path / "own"), read(tmp_path / "peft"))
    assert config_in(tmp_path / "own") == config_in(tmp_path / "peft")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "own")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_and_an_adapter_are_read_into_a_new_model(kind: str, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    model = adapted(KINDS[kind]())
    save_pretrained(prepared(model)[1], tmp_path / "adapter", like=tmp_path / "base")
    assert config_in(tmp_path / "adapter")["base_model_name_or_path"] == str(tmp_path / "base")
    lite, other = prepared(adapted(KINDS[kind](), seed=7))
    lite.load_weights(other, PretrainedWeights(tmp_path / "base", adapter=tmp_path / "adapter"))
    assert torch.equal(logits(other), logits(model))
    lite, other = prepared(peft.get_peft_model(base(), KINDS[kind]()))
    lite.load_weights(other, tmp_path / "adapter")
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_equal_merge_and_unload(kind: str, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    model = adapted(KINDS[kind]())
    before = logits(model)
    _, own = prepared(model)
    save_pretrained(own, tmp_path / "merged", merged=True)
    save_pretrained(own, tmp_path / "like", merged=True, like=tmp_path / "base")
    assert torch.equal(logits(model), before), "the model itself has changed"
    expected = model.merge_and_unload()
    for name in ("merged", "like"):
        found = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32
        )
        assert same(found.state_dict(), expected.state_dict())
        assert torch.equal(logits(found), logits(expected))


def test_one_adapter_of_several_is_named(tmp_path: Path) -> None:
    model = adapted(LORA())
    model.add_adapter("second", LORA(r=2))
    _, own = prepared(model)
    model.save_pretrained(tmp_path / "peft")
    for name, folder in (("default", "peft"), ("second", "peft/second")):
        save_pretrained(own, tmp_path / name, adapter=name)
        assert same(read(tmp_path / name), read(tmp_path / folder))
    model.set_adapter("second")
    save_pretrained(own, tmp_path / "active")
    assert same(read(tmp_path / "active"), read(tmp_path / "second"))
    with pytest.raises(ConfigurationError, match=r"expected one of default, second; received 'a'"):
        save_pretrained(own, tmp_path / "none", adapter="a")
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigurationError, match=r"adapter: expected one of .*; 2 are active"):
        save_pretrained(own, tmp_path / "none")
    save_pretrained(own, tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert same(merged.state_dict(), model.merge_and_unload().state_dict())


def test_layers_that_were_put_into_a_model_without_a_wrapper(tmp_path: Path) -> None:
    model = peft.inject_adapter_in_model(LORA(init_lora_weights=False), base())
    lite, own = prepared(model)
    save_pretrained(own, tmp_path / "own")
    lite.load_weights(own, tmp_path / "own")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "own")
    assert torch.equal(logits(again), logits(model))
    save_pretrained(own, tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert same(merged.state_dict(), again.merge_and_unload().state_dict())


# -- what is refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a LoRA adapter."""
    save_pretrained(prepared(adapted(LORA()))[1], tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("config", "sizes", "text"),
    [
        (LORA(r=2), {}, r"its r is 4 \(expected 2\); these have another shape: .*lora_A\.weight"),
        (LORA(lora_alpha=3), {}, r"its lora_alpha is 8 \(expected 3\)"),
        (LORA(use_dora=True), {}, r"its use_dora is False \(expected True\); it lacks .*magnitude"),
        (LORA(target_modules=["q_proj"]), {}, r"it has .*down_proj.*, which the model lacks"),
        (LORA(target_modules=["q_proj", "v_proj"]), {}, r"it lacks .*v_proj.*\(nearest: .*q_proj"),
        (KINDS["ia3"](), {}, r"its kind is LORA \(expected IA3\)"),
        (LORA(), {"hidden_size": 16}, r"these have another shape: .*\(4, 32\) \(expected \(4, 16"),
        (LORA(), {"num_hidden_layers": 1}, r"it has .*layers\.1\..*, which the model lacks"),
    ],
)
def test_an_adapter_of_another_model_changes_nothing(
    config: Any, sizes: dict[str, Any], text: str, folder: Path
) -> None:
    lite, own = prepared(adapted(config, **sizes))
    before = {name: value.clone() for name, value in own.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=f"an adapter of another model: {text}"):
        lite.load_weights(own, folder)
    assert same(own.state_dict(), before)


def test_folders_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    lite, own = prepared(base())
    with pytest.raises(ConfigurationError, match="has an adapter, and the model has none"):
        lite.load_weights(own, folder)
    with pytest.raises(ConfigurationError, match="expected the folder of a base model, and one of"):
        PretrainedWeights(folder, adapter=folder)
    base().save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigurationError, match=r"an adapter, which has adapter_config\.json"):
        PretrainedWeights(tmp_path / "base", adapter=tmp_path / "base")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has adapter_config\.json and no adapter_model\.s"):
        PretrainedWeights(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointCorruptError, match=r"is no config of PEFT .it names no peft_ty"):
        PretrainedWeights(folder)


def test_base_weights_that_an_initialization_has_changed(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    lite, own = prepared(adapted(LORA(init_lora_weights="pissa")))
    with pytest.raises(ConfigurationError, match=r"init_lora_weights='pissa', which changes the"):
        lite.load_weights(own, tmp_path / "base")


def test_adapters_that_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prompt = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    _, own = prepared(adapted(prompt))
    with pytest.raises(CheckpointContentError, match="of the kind PROMPT_TUNING, of which PEFT st"):
        save_pretrained(own, out)
    with pytest.raises(CheckpointContentError, match="PROMPT_TUNING, which changes no weights"):
        save_pretrained(own, out, merged=True)
    _, own = prepared(adapted(LORA(target_modules=["lm_head"]), tie_word_embeddings=True))
    with pytest.raises(CheckpointContentError, match=r"lm_head\.\S+ is tied to another parameter"):
        save_pretrained(own, out, merged=True)
    _, own = prepared(adapted(LORA(target_modules=[], target_parameters=["q_proj.weight"])))
    with pytest.raises(CheckpointContentError, match=r"q_proj is a ParamWrapper of PEFT, which is"):
        save_pretrained(own, out, merged=True)
    model = adapted(LORA())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(CheckpointContentError, match=r"is quantized .torch\.uint8.: save the ada"):
        save_pretrained(prepared(model)[1], out, merged=True)
    _, own = prepared(base())
    with pytest.raises(ConfigurationError, match="merged=True: the model has no adapters"):
        save_pretrained(own, out, merged=True)
    with pytest.raises(ConfigurationError, match="adapter='a': the model has no adapters"):
        save_pretrained(own, out, adapter="a")
    pair = torch.nn.ModuleDict({"one": adapted(LORA()), "two": adapted(LORA())})
    _, own = prepared(pair)
    with pytest.raises(
        ConfigurationError, match=r"2 models have adapters .one, two.: name one, par"
    ):
        save_pretrained(own, out)
    assert not out.exists()
    save_pretrained(own, out, part="two")
    assert same(read(out), peft.get_peft_model_state_dict(pair["two"]))


# -- checkpoints


def trained(model: Any, folder: Path) -> Path:
    """The path of a checkpoint of a LanguageModule with a model."""
    rows: Any = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        callbacks=ModelCheckpoint(folder, save_last=True),
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModule(model, partial(torch.optim.AdamW, lr=1e-2)), DataLoader(rows, 2))
    save_pretrained(trainer, folder / "expected")
    return next(folder.glob("*.ckpt"))


@pytest.mark.parametrize("kind", ["lora", "modules to save", "dora", "tokens", "ia3", "vera"])
def test_a_checkpoint_becomes_the_folder_of_its_adapter(kind: str, tmp_path: Path) -> None:
    checkpoint = trained(adapted(KINDS[kind]()), tmp_path)
    convert(checkpoint, tmp_path / "own", to="huggingface")
    assert same(read(tmp_path / "own"), read(tmp_path / "expected"))
    assert config_in(tmp_path / "own") == config_in(tmp_path / "expected")
    convert(checkpoint, tmp_path / "like", to="huggingface", layout={"like": tmp_path / "expected"})
    assert same(read(tmp_path / "like"), read(tmp_path / "expected"))


def test_a_checkpoint_of_which_the_adapter_cannot_be_told(tmp_path: Path) -> None:
    state = {"state_dict": adapted(LORA()).state_dict()}
    torch.save(state, tmp_path / "plain.ckpt")
    into = partial(convert, target=tmp_path / "out", to="huggingface")
    with pytest.raises(CheckpointContentError, match=r"and not their config: pass --like FOLDER"):
        into(tmp_path / "plain.ckpt")
    KINDS["loha"]().save_pretrained(tmp_path / "loha")
    with pytest.raises(
        CheckpointContentError, match=r"the kind LOHA, of which the model has to sa"
    ):
        into(tmp_path / "plain.ckpt", layout={"like": tmp_path / "loha"})
    LORA(bias="all").save_pretrained(tmp_path / "bias")
    with pytest.raises(CheckpointContentError, match=r"the kind LORA, bias='all', of which the mo"):
        into(tmp_path / "plain.ckpt", layout={"like": tmp_path / "bias"})
    KINDS["ia3"]().save_pretrained(tmp_path / "ia3")
    with pytest.raises(
        CheckpointContentError, match=r"has no tensors of a PeftModel of the kind I"
    ):
        into(tmp_path / "plain.ckpt", layout={"like": tmp_path / "ia3"})
    model = adapted(LORA())
    model.add_adapter("second", LORA())
    with pytest.raises(CheckpointContentError, match=r"has 2 adapters .default, second.: load the"):
        into(trained(model, tmp_path / "two"))
    assert not (tmp_path / "out").exists()


# -- a base in 4 bits

FOUR_BITS = Path(__file__).parent / "scripts" / "adapters_4bit.py"


def train(folder: Path, strategy: str, ranks: int, form: str, what: str) -> dict[str, Any]:
    arguments = (str(folder), strategy, str(ranks), "nf4", form, what)
    environment = {"PYTHONWARNINGS": "ignore"}
    run_file(FOUR_BITS, *arguments, folder=folder, env=environment)
    found: dict[str, Any] = json.loads((folder / f"{what}.json").read_text())
    return found


@pytest.fixture(scope="module")
def in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses and bytes of one process."""
    pytest.importorskip("bitsandbytes", reason="`nox -s huggingface` runs this")
    folder = tmp_path_factory.mktemp("four_bits")
    return train(folder, "single_device", 1, "single_file", "plain")


@pytest.mark.parametrize(
    ("strategy", "form"),
    [("ddp", "single_file"), ("fsdp", "single_file"), ("fsdp", "directory"), ("mesh", "directory")],
)
def test_a_base_in_4_bits_trains_as_in_one_process_and_resumes_exactly(
    strategy: str, form: str, in_4_bits: dict[str, Any], tmp_path: Path
) -> None:
    found = train(tmp_path, strategy, 2, form, "plain")
    assert found["losses"] == pytest.approx(in_4_bits["losses"], rel=1e-6)
    assert found["bytes"] == in_4_bits["bytes"] // (1 if strategy == "ddp" else 2)
    assert len(read(tmp_path / "adapter")) == 8
    assert train(tmp_path, strategy, 2, form, "read") == found
    whole, first, second = (
        train(tmp_path, strategy, 2, form, what)["losses"] for what in ("whole", "first", "second")
    )
    assert len(first) == 5
    assert first + second == whole


# -- strategies


def run(folder: Path, *arguments: str) -> dict[str, list[float]]:
    environment = {"PYTHONWARNINGS": "ignore"}
    run_file(SCRIPT, str(folder), *arguments, folder=folder, env=environment)
    found: dict[str, list[float]] = json.loads((folder / f"{arguments[0]}.json").read_text())
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folders and losses of one process."""
    folder = tmp_path_factory.mktemp("adapters")
    run_file(SCRIPT, str(folder / "base"), "base", "1", folder=folder)
    return folder, run(folder, "single_device", "1")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_train_as_in_one_process_and_are_written_from_shards(
    strategy: str, one: tuple[Path, dict[str, list[float]]]
) -> None:
    folder, expected = one
    kinds = ["rslora"] if strategy == "mesh_tensor" else []
    found = run(folder, strategy, "2", *kinds)
    assert list(found) == (kinds or list(expected))
    for kind, losses in found.items():
        assert losses[:-1] == pytest.approx(expected[kind][:-1], rel=1e-6)
        assert losses[-1] == pytest.approx(losses[-2], rel=1e-6), "the model that has read it"
        written = folder / f"{kind} of {strategy}"
        assert same(read(written), read(folder / f"{written.name}, again"))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        model = peft.PeftModel.from_pretrained(theirs, written)
        assert same(peft.get_peft_model_state_dict(model), read(written))
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            folder / f"{written.name}, merged"
        )
        torch.testing.assert_close(logits(merged), logits(model.merge_and_unload()))
