"""Transformers' models divided between ranks: `tensor_language.py FOLDER RANKS [sequence]`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tensor_loss import of_language, refusals
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stratagem import Lite
from stratagem.errors import UserCodeError
from stratagem_mesh.tensor.layers import SequenceOptions, divide_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **{"bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, **NO_DROPOUT}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **{**GROUPED, "head_dim": 8, "sliding_window": 4},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, **NO_DROPOUT, "image_size": 16, "patch_size": 4},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
            **{"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{"decoder_start_token_id": 1, "dropout": 0.0},
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2},
            **{"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
}
TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def inputs(model: Any) -> dict[str, Any]:
    dtype = model.dtype
    if model.main_input_name == "pixel_values":
        pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16, dtype=dtype).reshape(2, 3, 16, 16).sin()
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if model.main_input_name == "input_features":
        sound = torch.linspace(-9, 9, 2 * 8 * 32, dtype=dtype).reshape(2, 8, 32).sin()
        return {"input_features": sound, "labels": TOKENS}
    return {"input_ids": TOKENS, "labels": TOKENS}


def with_lora(model: Any) -> Any:
    """Return a model with LoRA in each layer, which has trained for a while."""
    import peft

    options = {"target_modules": "all-linear", "fan_in_fan_out": "GPT2" in type(model).__name__}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from peft, of transformers' names
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: Any) -> tuple[float, dict[str, Any]]:
    model.zero_grad()
    loss = model(**inputs(model)).loss
    torch.autograd.backward(loss)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), {name: whole(p.grad) for name, p in trained.items()}


def compare(build: Callable[[], Any], mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = build().train()
    model = deepcopy(reference)
    layers = divide_layers(model, mesh, None)
    found: dict[str, Any] = {"layers": layers}
    for dtype in (torch.float32, torch.float64):
        loss, own = gradients(model.to(dtype))
        expected_loss, expected = gradients(reference.to(dtype))
        assert own.keys() == expected.keys()
        errors = {
            name: float((own[name] - g).abs().max() / g.abs().max().clamp_min(1e-6))
            for name, g in expected.items()
            if g is not None
        }
        found[str(dtype)] = abs(loss - expected_loss), max(errors.values())
    parameters = list(model.parameters())
    divided = [
        p.numel() for p in parameters if isinstance(p, DTensor) and p.placements[0].is_shard()
    ]
    found["share"] = sum(divided) / sum(p.numel() for p in parameters)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found["tied"] = head is not None and head.weight is embedding.weight
    return found


LOSSES = "gpt2", "llama", "llama, tied", "gemma3"
IN_PARTS = "gpt2", "bert", "llama", "gemma3", "mistral"


def in_parts(build: Callable[[], Any], mesh: DeviceMesh, *, repeats: bool) -> float:
    """Return how far gradients with sequence parallelism are from one process, in float64."""
    torch.manual_seed(0)
    reference = build().double().train()
    model = deepcopy(reference)
    if repeats:
        enable = getattr(model, "activation_checkpointing_enable", None)  # the newer name
        (enable or model.gradient_checkpointing_enable)()
    divide_layers(model, mesh, None, sequence=SequenceOptions())
    tokens = TOKENS[:, :11].contiguous()  # does not divide between the ranks
    for one in (model, reference):
        torch.autograd.backward(one(input_ids=tokens, labels=tokens).loss)
    own = {name: whole(p.grad) for name, p in model.named_parameters()}
    return max(
        float((own[name] - p.grad).abs().max() / p.grad.abs().max().clamp_min(1e-6))
        for name, p in reference.named_parameters()
        if p.grad is not None
    )


def states(build: Callable[[], Any], mesh: DeviceMesh) -> str:
    model = build().train()
    divide_layers(model, mesh, None, sequence=SequenceOptions())
    try:
        model(**inputs(model), output_hidden_states=True)
    except UserCodeError as error:
        return str(error)
    return "nothing was raised"


def main(lite: Lite, folder: str, *, sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (lite.world_size,), mesh_dim_names=("tensor_parallel",))
    out: dict[str, Any] = {}
    builds: dict[str, Any] = {}
    if sequence:  # losses and some norms compute in float32 otherwise
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for name, (kind, config, options) in MODELS.items():
        made = getattr(transformers, config)(**options)
        build = partial(getattr(transformers, kind), made)
        if sequence and name in IN_PARTS:
            out[name] = [in_parts(build, mesh, repeats=one) for one in (False, True)]
        elif not sequence:
            out[name] = compare(build, mesh)
        if not sequence and name in ("gpt2", "llama"):
            out[f"{name}, LoRA"] = compare(lambda build=build: with_lora(build()), mesh)
        if sequence and name == "llama":
            out["states"] = states(build, mesh)
        if sequence and name in LOSSES:
            out[f"loss of {name}"] = of_language(build, TOKENS, mesh)
        builds[name] = build
    if sequence:
        out["messages"] = refusals(builds, TOKENS, mesh)
    if lite.is_global_zero:
        Path(folder, "found.json").write_text(json.dumps(out))
    lite.barrier()


if __name__ == "__main__":
    fabric = Lite(accelerator="cpu", devices=int(sys.argv[2]), strategy="ddp")
    fabric.launch()
    main(fabric, sys.argv[1], sequence="sequence" in sys.argv)
