"""The stages of tiny models of transformers, in one process: writes out.json."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from pipeline_in_turn import Positions, compare

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "attn_implementation": "sdpa",
}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KEYS = {**SIZES, "num_key_value_heads": 1, "pad_token_id": 0}
EXPERTS = {**KEYS, "num_experts_per_tok": 2, "head_dim": 8}

Case = tuple[str, str, dict[str, Any], list[list[str]]]

MODELS: dict[str, Case] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 50, "n_positions": 32},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        [["transformer.h.1"], ["transformer.h.0", "transformer.h.2", "transformer.ln_f"]],
    ),
    "BERT": (
        "BertForMaskedLM",
        "BertConfig",
        BERT,
        [["bert.encoder.layer.2"], ["bert.encoder.layer.1", "bert.encoder.layer.2", "cls"]],
    ),
    "Llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        KEYS,
        [["model.layers.1"], ["model.layers.0", "model.layers.3", "model.norm"]],
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {**BERT, "image_size": 8, "patch_size": 4},
        [["vit.layers.2"], ["vit.layers.0", "vit.layers.2", "vit.layernorm"]],
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"num_layers": 3, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8},
            **{"vocab_size": 50, "dropout_rate": 0.0, "decoder_start_token_id": 0},
            "pad_token_id": 0,
        },
        [
            ["encoder.block.1"],
            ["decoder"],
            ["decoder.block.0"],
            ["decoder.block.1"],
            ["encoder.block.2", "decoder.block.1", "decoder.block.2"],
        ],
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50},
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8},
            **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 10},
            **{"max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1},
            **{"eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0},
        },
        [
            ["model.decoder"],
            ["model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"],
        ],
    ),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**SIZES, "num_hidden_layers": 2, "eos_token_id": 2},
            "vision_config": {**SIZES, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4},
            "projection_dim": 8,
        },
        [["text_model"], ["vision_model.encoder.layers.1", "text_model.encoder.layers.1"]],
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**EXPERTS, "num_local_experts": 4},
        [["model.layers.2"], ["model.layers.1", "model.layers.2", "lm_head"]],
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8},
        [["model.layers.2"], ["model.layers.1", "model.layers.2", "lm_head"]],
    ),
}


def batch_of(name: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, 50, (2, 7))
    tokens[:, -1] = 2
    labels = tokens.clone()
    labels[0, :3] = -100
    if name == "ViT":
        return {"pixel_values": torch.randn(3, 3, 8, 8).double(), "labels": torch.tensor([0, 1, 1])}
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 20).double(), "labels": labels}
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    if name == "CLIP":
        images = torch.randn(2, 3, 8, 8).double()
        return {"input_ids": tokens, "pixel_values": images}
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "labels" not in batch:
        loss: Tensor = model(**batch, return_loss=True).loss
        return loss
    loss = model(**batch).loss
    return loss


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    found = (
        model(**batch, use_cache=False) if hasattr(model.config, "use_cache") else model(**batch)
    )
    kept = "logits", "loss", "logits_per_image", "last_hidden_state", "encoder_last_hidden_state"
    return {key: found[key] for key in kept if key in found}


def made(name: str, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    kind, config, options, _ = MODELS[name]
    torch.manual_seed(0)
    of_config = getattr(transformers, config)(**{**options, **changes})
    model = getattr(transformers, kind)(of_config).double().train()
    if "num_experts_per_tok" in options:
        model.set_experts_implementation("eager")  # the other one computes in float32 alone
    return model, batch_of(name)


def cases(name: str) -> list[tuple[int, Sequence[str] | None, int]]:
    lists = MODELS[name][3]
    named = [(len(cuts) + 1, cuts, 1) for cuts in lists]
    virtual = [(4, lists[-1], 2), (4, None, 2)] if len(lists[-1]) == 3 else []
    return [*named, (2, None, 1), (3, None, 1), *virtual]


def result_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


# -- features


def checkpointed() -> None:
    model, batch = made("Llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(model, step, batch, 3, outputs=outputs)


def reentrant() -> None:
    model, batch = made("Llama")

    def repeated(model: Any, batch: Any) -> Tensor:
        layers = model.model.layers
        x = model.model.embed_tokens(batch["input_ids"])
        places = torch.arange(x.shape[1])[None]
        tables = model.model.rotary_emb(x, places)
        for layer in layers:
            x = checkpoint(
                lambda x, layer=layer: layer(x, position_embeddings=tables), x, use_reentrant=True
            )
        loss: Tensor = model.lm_head(x).square().mean()
        return loss

    compare(model, repeated, batch, 2, ["model.layers.2"])


def dropout() -> None:
    """Each stage draws in its own units from where the whole model does: only one unit draws."""
    model, batch = made("GPT-2", embd_pdrop=0.5)
    compare(model, step, batch, 3, outputs=outputs)


def cache() -> None:
    model, batch = made("Llama")
    positions = Positions(model.eval(), 2)
    given = transformers.DynamicCache(config=model.config)
    positions.evaluate(lambda model: model(batch["input_ids"], past_key_values=given))


def generated() -> None:
    model, batch = made("Llama", use_cache=False)
    model.eval()

    def generate(model: Any) -> Any:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        return model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)

    expected = generate(copy.deepcopy(model))
    for found in Positions(model, 2).evaluate(generate):
        assert torch.equal(found, expected)


def hidden_states() -> None:
    model, batch = made("Llama")

    def states(model: Any, batch: Any) -> Any:
        return model(**batch, output_hidden_states=True, use_cache=False).hidden_states

    def of_states(model: Any, batch: Any) -> Tensor:
        found = model(**batch, output_hidden_states=True)
        loss: Tensor = found.loss + sum(state.square().mean() for state in found.hidden_states)
        return loss

    compare(model, of_states, batch, 3, outputs=states)


def router() -> None:
    model, batch = made("Mixtral", output_router_logits=True)
    compare(model, step, batch, 2)


def adapters() -> None:
    from peft import LoraConfig, get_peft_model

    model, batch = made("Llama")
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compare(get_peft_model(model, config).double(), step, batch, 3, outputs=outputs)


FEATURES: dict[str, Callable[[], None]] = {
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    "dropout": dropout,
    "cache": cache,
    "generated": generated,
    "hidden states": hidden_states,
    "router": router,
    "adapters": adapters,
}


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for name in sys.argv[1:] or MODELS:
        if name in FEATURES:
            continue
        for count, cuts, virtual in cases(name):
            model, batch = made(name)
            key = f"{count} {'balanced' if cuts is None else ' '.join(cuts)} {virtual}"
            found.setdefault(name, {})[key] = result_of(
                partial(compare, model, step, batch, count, cuts, virtual=virtual, outputs=outputs)
            )
    features = {
        name: result_of(run)
        for name, run in FEATURES.items()
        if not sys.argv[1:] or name in sys.argv[1:]
    }
    Path("out.json").write_text(json.dumps({"models": found, "features": features}, indent=1))


if __name__ == "__main__":
    main()
