"""Tiny models of transformers on ranks that share a sequence: `... RANKS` writes out0.json."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from stratagem.errors import StratagemError
from stratagem_mesh.context.regions import ContextRegions

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KEYS = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
LAYERS = ["sliding_attention", "full_attention"] * 2

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            **{"bos_token_id": 1, "eos_token_id": 1, "attn_implementation": "sdpa"},
        },
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "BERT, classes of tokens": ("BertForTokenClassification", "BertConfig", BERT),
    "BERT, classes of texts": ("BertForSequenceClassification", "BertConfig", BERT),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", BERT),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", KEYS),
    "Llama, three heads": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**KEYS, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**KEYS, "head_dim": 8}),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **{**KEYS, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8},
            **{"sliding_window": 7, "layer_types": LAYERS},
        },
    ),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**KEYS, "sliding_window": 7}),
}

IMAGE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 24, "patch_size": 4},
}
"""Of an encoder of images, with 37 positions."""

BATCHES = ("ragged labels", "left", "right", "packed", "items", "checkpointed")


def build(name: str) -> Any:
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    return made(kind, config, **options).double().train()


def batch(name: str, kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    length = 27
    ids = torch.randint(3, 100, (2, length), generator=generator)
    labels = torch.randint(0, 2, (2, length), generator=generator) if "classes" in name else ids
    labels = labels.clone()
    labels[0, :15] = labels[1, 23:] = -100
    made: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if "texts" in name:
        made["labels"] = torch.tensor([0, 1])
    if kind in ("left", "right"):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, slice(5) if kind == "left" else slice(-5, None)] = 0
        made["attention_mask"] = mask
    if kind == "packed":
        restarting = torch.cat([torch.arange(9), torch.arange(length - 9)])
        made["position_ids"] = restarting.expand(2, -1)
    if kind == "items":
        made["num_items_in_batch"] = torch.tensor(37)
    return made


def differences(name: str, kind: str, ranks: int) -> dict[str, float]:
    """Return how far loss, gradients and an evaluation are from those of one process."""
    inputs = batch(name, kind)
    alone, model = build(name), build(name)
    if kind == "packed":
        alone.config.use_cache = model.config.use_cache = False
    if kind == "checkpointed":
        model.gradient_checkpointing_enable()
    ContextRegions(group()).divide(model, None)
    losses = [one(**inputs).loss for one in (alone, model)]
    for loss in losses:
        torch.autograd.backward(loss)
    error = 0.0
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        if whole.grad is not None:
            dist.all_reduce(own.grad)
            error = max(error, relative(own.grad / ranks, whole.grad))
    with torch.no_grad():
        outputs = [one.eval()(**inputs) for one in (model, alone)]
    return {
        "loss": relative(losses[1].detach(), losses[0].detach()),
        "gradients": error,
        "evaluation": max(relative(outputs[0][key], outputs[1][key]) for key in ("loss", "logits")),
    }


def relative(own: Tensor, whole: Tensor) -> float:
    return float((own - whole).abs().max() / (whole.abs().max() + 1e-9))


def group() -> Any:
    return dist.group.WORLD


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except StratagemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def made(kind: str, config: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def divided(kind: str, config: str, **options: Any) -> Any:
    model = made(kind, config, **options)
    ContextRegions(group()).divide(nn.Sequential(model), None)
    return model


def messages() -> dict[str, str]:
    inputs = batch("Llama", "ragged labels")
    llama = divided("LlamaForCausalLM", "LlamaConfig", **KEYS)
    few = {"d_model": 24, "vocab_size": 50, "pad_token_id": 0}
    hidden = torch.zeros(2, 27, 32)
    return {
        "T5": message(lambda: divided("T5Model", "T5Config", **few, d_kv=4, d_ff=16)),
        "Whisper": message(lambda: divided("WhisperModel", "WhisperConfig", **few)),
        "ViT": message(lambda: divided("ViTModel", "ViTConfig", **IMAGE)),
        "eager": message(
            lambda: divided(
                "LlamaForCausalLM", "LlamaConfig", **{**KEYS, "attn_implementation": "eager"}
            )
        ),
        "attentions": message(lambda: llama(**inputs, output_attentions=True)),
        "other outputs": message(
            lambda: divided("MixtralForCausalLM", "MixtralConfig", **KEYS, num_local_experts=2)(
                inputs["input_ids"], output_router_logits=True
            )
        ),
        "one dimension": message(lambda: llama(inputs["input_ids"][0])),
        "mask function": message(lambda: with_mask_function(llama, inputs)),
        "logits": message(lambda: llama(**inputs).logits.shape),
        "two sequences": message(
            lambda: divided("BertModel", "BertConfig", **BERT)(
                inputs["input_ids"], encoder_hidden_states=hidden
            )
        ),
        "positions": message(
            lambda: divided(
                "OPTForCausalLM",
                "OPTConfig",
                **{"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "vocab_size": 100},
                **{"num_attention_heads": 4, "word_embed_proj_dim": 32, "dropout": 0.0},
            )(**batch("OPT", "left"))
        ),
    }


def with_mask_function(llama: Any, inputs: dict[str, Any]) -> Any:
    """Call a model whose masks have a function of its own, as those of multimodal models."""
    file = sys.modules[type(llama).__module__]
    create = file.create_causal_mask
    file.create_causal_mask = partial(
        create, or_mask_function=lambda _, head, query, key: query == key
    )
    try:
        return llama(**inputs)
    finally:
        file.create_causal_mask = create


def others() -> dict[str, Any]:
    """Return how far other outputs are from those of one process."""
    inputs = batch("Llama", "left")
    alone, model = build("Llama"), build("Llama")
    ContextRegions(group(), gather_logits=True).divide(model, None)
    with torch.no_grad():
        texts = [
            one.eval().generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)
            for one in (alone, model)
        ]
        states = [one(**inputs, output_hidden_states=True).hidden_states for one in (alone, model)]
    logits = [one.train()(**inputs).logits.detach() for one in (alone, model)]
    images = []
    pixels = torch.linspace(0, 1, 2 * 3 * 24 * 24).view(2, 3, 24, 24)
    for names in (None, ["0.layers.*"]):
        torch.manual_seed(0)
        image = made("ViTModel", "ViTConfig", **IMAGE).double().eval()
        if names:
            ContextRegions(group()).divide(nn.Sequential(image), names)
        images.append(image(pixels.double()).last_hidden_state.detach())
    return {
        "generated is equal": torch.equal(*texts),
        "hidden states": max(relative(b, a) for a, b in zip(*states, strict=True)),
        "logits": relative(logits[1], logits[0]),
        "images": relative(images[1], images[0]),
        "a loss of no label": loss_of_no_label(),
    }


def loss_of_no_label() -> float:
    inputs, model = batch("Llama", "ragged labels"), build("Llama")
    ContextRegions(group()).divide(model, None)
    return float(model(**{**inputs, "labels": torch.full_like(inputs["labels"], -100)}).loss)


def run(rank: int, ranks: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    # Losses and some norms compute in float32 otherwise.
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {name: {kind: differences(name, kind, ranks) for kind in BATCHES} for name in MODELS}
    out = {"differences": found, "others": others(), "messages": messages()}
    Path(f"out{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = str(listener.getsockname()[1])
    start: Any = spawn
    start(run, (count, free), nprocs=count)
