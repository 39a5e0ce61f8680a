"""Attention of torch divided by heads, beside whole ones: `python tensor_multihead.py FOLDER`."""

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
from tensor_divide import capture, whole
from tensor_models import Adapted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem.strategies import apply_activation_checkpointing
from stratagem_mesh.tensor.layers import SequenceOptions, divide_layers

warnings.simplefilter("ignore")  # of torch's encoders, and of its compiler

LENGTH, KEYS, HEADS = 6, 5, 4
PLAN = {"attention": "multihead"}
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(KEYS) >= torch.tensor([[5], [3]])


def values(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-2, 2, count, dtype=torch.float64).mul(7).sin().view(shape)


class Calls(nn.Module):
    """Calls an attention with the options of a case, and returns its outputs."""

    def __init__(self, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, HEADS, **{"batch_first": True, **options})
        call = dict(call)
        learned = call.pop("learned", None)
        self.bias = nn.Parameter(learned) if learned is not None else None
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        bias = {} if self.bias is None else {"attn_mask": self.bias}
        query, *others = inputs
        key = others[0] if others else query
        return self.attention(query, key, others[-1] if others else query, **bias, **self.call)


SELF = (values(2, LENGTH, 16),)
CROSS = values(2, LENGTH, 16), values(2, KEYS, 16).cos()
OTHERS = values(2, LENGTH, 16), values(2, KEYS, 12), values(2, KEYS, 10)
EACH = values(2 * HEADS, LENGTH, LENGTH)
Options = dict[str, Any]
QUIET: Options = {"need_weights": False}
CALLS: dict[str, tuple[Options, Options, tuple[Tensor, ...]]] = {
    "weights": ({}, {}, SELF),
    "weights of heads": ({"average_attn_weights": False}, {}, CROSS),
    "no weights": (QUIET, {}, SELF),
    "no bias": (QUIET, {"bias": False}, SELF),
    "cross": (QUIET, {}, CROSS),
    "other features": (QUIET, {"kdim": 12, "vdim": 10}, OTHERS),
    "other features, weights": ({}, {"kdim": 12, "vdim": 10, "bias": False}, OTHERS),
    "sequence first": (QUIET, {"batch_first": False}, tuple(x.transpose(0, 1) for x in CROSS)),
    "one sample": ({}, {}, tuple(x[0] for x in CROSS)),
    "one sample, heads": ({"attn_mask": EACH[:HEADS]}, {"batch_first": False}, (SELF[0][0],)),
    "padding": ({"key_padding_mask": PADDING, **QUIET}, {}, CROSS),
    "padding, weights": ({"key_padding_mask": PADDING}, {}, CROSS),
    "padding added": ({"key_padding_mask": values(2, KEYS), **QUIET}, {}, CROSS),
    "causal": ({"attn_mask": CAUSAL, "is_causal": True, **QUIET}, {}, SELF),
    "causal, weights": ({"attn_mask": CAUSAL, "is_causal": True}, {}, SELF),
    "causal, padding": (
        {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": CAUSAL[3:5], **QUIET},
        {},
        SELF,
    ),
    "mask": ({"attn_mask": CAUSAL, **QUIET}, {}, SELF),
    "mask added": ({"attn_mask": values(LENGTH, LENGTH)}, {}, SELF),
    "mask of heads": ({"attn_mask": EACH, **QUIET}, {}, SELF),
    "mask of heads, bool": ({"attn_mask": (EACH > 0.5) & CAUSAL}, {}, SELF),
    "trained mask": ({"learned": values(LENGTH, LENGTH), **QUIET}, {}, SELF),
    "trained mask of heads": ({"learned": EACH}, {}, SELF),
    "frozen": (QUIET, {}, SELF),
}
WHOLE: dict[str, Options] = {
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
}


def total(output: Any) -> Tensor:
    parts = [part for part in output if part is not None]
    found: Tensor = sum((i + 1) * part.square().mean() for i, part in enumerate(parts))  # type: ignore[assignment]
    return found


def run(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the outputs of a call, and the gradients of parameters and inputs."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    output = model(*leaves)
    output = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(total(output))
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    found |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.is_floating_point()}
    gradients = {name: whole(grad) for name, grad in found.items()}
    return [part.detach() for part in output if part is not None], gradients


def apart(one: Any, other: Any) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))


def difference(model: nn.Module, alone: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Return how far outputs, gradients and an evaluation are from one process."""
    errors = []
    for mode in (True, False):
        (outputs, own), (expected, of_one) = (
            run(one.train(mode), inputs) for one in (model, alone)
        )
        assert own.keys() == of_one.keys()
        errors += [apart(own[name], grad) for name, grad in of_one.items()]
        errors += [apart(a, b) for a, b in zip(outputs, expected, strict=True)]
    with torch.inference_mode():
        outputs, expected = (one(*inputs) for one in (model, alone))
    if isinstance(outputs, Tensor):
        outputs, expected = (outputs,), (expected,)
    pairs = [(a, b) for a, b in zip(outputs, expected, strict=True) if b is not None]
    return max(*errors, *(apart(a, b) for a, b in pairs))


def of_call(name: str, mesh: DeviceMesh) -> float:
    call, options, inputs = CALLS[name]
    torch.manual_seed(0)
    alone = Calls(call, **options).double()
    for key, parameter in alone.named_parameters():
        parameter.requires_grad_(name != "frozen" or "out_proj" in key)
    model = deepcopy(alone)
    divide_layers(model, mesh, PLAN)
    return difference(deepcopy(model), alone, inputs)


# -- models of torch


class Encoder(nn.Module):
    """An encoder, with padding at the end of the second sequence."""

    def __init__(self, *, heads: int = HEADS, masked: str = "", **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True, "dropout": 0.0, **options}
        layer = nn.TransformerEncoderLayer(16, heads, 32, **options)
        norm = nn.LayerNorm(16) if options.get("norm_first") else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padding = torch.arange(length) >= torch.tensor([[length], [length - 2]])
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.masked == "causal":
            return self.encoder(x, mask=later, is_causal=True, src_key_padding_mask=padding)
        if self.masked == "heads":
            bias = values(len(x) * HEADS, length, length).to(x.dtype)
            return self.encoder(x, mask=bias)
        return self.encoder(x, src_key_padding_mask=padding)


class Pair(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Transformer(16, HEADS, 1, 2, 32, 0.0, **{"batch_first": True, **options})

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1 if self.body.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=target.dtype)
        return self.body(source, target, tgt_mask=mask, tgt_is_causal=True)  # type: ignore[no-any-return]


class Own(nn.Module):
    """Blocks with attention that is asked for its weights, and a layer that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


Model = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]
MODELS: dict[str, Model] = {
    "encoder": (Encoder, SELF),
    "encoder, norm first": (partial(Encoder, norm_first=True), SELF),
    "encoder, causal": (partial(Encoder, masked="causal", activation="gelu"), SELF),
    "encoder and decoder": (Pair, CROSS),
    "encoder and decoder, sequence first": (
        partial(Pair, batch_first=False),
        tuple(x.transpose(0, 1) for x in CROSS),
    ),
    "own": (Own, SELF),
}
WAYS = {
    "whole": tuple(MODELS),
    "sequence": tuple(MODELS),
    "recomputed": ("encoder", "encoder and decoder", "own"),
    "recomputed attention": ("encoder",),
    "compiled": ("encoder", "own"),
}
BLOCKS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, OwnBlock


def of_model(name: str, mesh: DeviceMesh, way: str) -> float:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    alone = build().double()
    for parameter in alone.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = deepcopy(alone)
    sequence = SequenceOptions() if way == "sequence" else None
    divide_layers(model, mesh, None, inputs, sequence=sequence)
    if way == "recomputed":
        apply_activation_checkpointing(model, {*BLOCKS})
    if way == "recomputed attention":
        apply_activation_checkpointing(model, {nn.MultiheadAttention})
    if way == "compiled":
        for part in [part for part in model.modules() if isinstance(part, BLOCKS)]:
            part.compile(backend="aot_eager")
    return difference(model, alone, inputs)


def held(mesh: DeviceMesh) -> dict[str, float]:
    """Return the share of each parameter's values that this rank holds."""
    model = Calls({})
    divide_layers(model, mesh, PLAN)
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).numel() / p.numel()
        for name, p in model.named_parameters()
    }


def at_padding(mesh: DeviceMesh) -> list[float]:
    """Return the largest outputs at padding, in one process and divided."""
    alone = Encoder().double().eval()
    model = deepcopy(alone)
    divide_layers(model, mesh, None, SELF)
    with torch.no_grad():
        return [float(one(*SELF)[1, -2:].abs().max()) for one in (alone, model)]


def dropped(mesh: DeviceMesh) -> list[Any]:
    """Return which keys each head keeps, and a number that all ranks draw afterwards."""
    model = Calls({"average_attn_weights": False}, dropout=0.5)
    divide_layers(model, mesh, PLAN)
    torch.manual_seed(0)
    weights = [(model(*(x.float() for x in SELF))[1] > 0).tolist() for _ in range(2)]
    return [*weights, torch.rand(1).item()]


# -- what is refused, and what stays whole


class Reads(Calls):
    """Reads the weights of its attention."""

    def forward(self, *inputs: Tensor) -> Any:
        output = super().forward(*inputs)[0]
        return output @ self.attention.in_proj_weight[:16]


def reasons(mesh: DeviceMesh) -> list[str]:
    """Return what is said of attention that stays whole."""
    adapted = Calls(QUIET)
    adapted.attention.out_proj = Ignored(adapted.attention.out_proj)  # type: ignore[assignment]
    models: list[nn.Module] = [Reads({}), adapted]
    models += [Calls(QUIET, **options) for options in WHOLE.values()]
    found = []
    for model in models:
        net = nn.Sequential(model, Output(), nn.Linear(16, 32), nn.Linear(32, 16)).double()
        alone = deepcopy(net)
        with capture("stratagem") as records:
            divide_layers(net, mesh, None, SELF)
        assert model is adapted or difference(net, alone, SELF) < 1e-10
        found += records
    with capture("stratagem") as records:
        divide_layers(Encoder(heads=1), mesh, None, tuple(x.float() for x in SELF))
    return [*found, *records]


class Ignored(Adapted):
    """Has the weight of its base layer, as adapters of PEFT, which torch's attention reads."""

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias


class Output(nn.Module):
    def forward(self, output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except StratagemError as error:
        return str(error)
    return "nothing was raised"


def messages(mesh: DeviceMesh) -> dict[str, str]:
    def plan(model: nn.Module, plan: Any = None) -> str:
        return message(lambda: divide_layers(model, mesh, plan or PLAN))

    model = Calls(QUIET)
    divide_layers(model, mesh, PLAN)
    call: Any = model.attention
    x = torch.zeros(2, LENGTH, 16)
    odd = Calls({})
    odd.attention = nn.MultiheadAttention(16, 1)
    replaced = Calls({})
    replaced.attention.out_proj = Adapted(nn.Linear(16, 16))  # type: ignore[assignment]
    adapted = Calls({})
    adapted.attention = Adapted(nn.Linear(16, 16))  # type: ignore[assignment]
    adapted.attention.base_layer = nn.MultiheadAttention(16, 4)
    return {
        "heads": plan(odd),
        "kind": plan(nn.Sequential(nn.Linear(8, 8)), {"0": "multihead"}),
        "out_proj": plan(Calls({}), {**PLAN, "attention.out_proj": "colwise"}),
        "adapter": plan(adapted),
        "adapter of out_proj": plan(replaced),
        **{name: plan(Calls({}, **options)) for name, options in WHOLE.items()},
        "mask": message(lambda: call(x, x, x, attn_mask=torch.zeros(1, LENGTH))),
        "padding": message(lambda: call(x, x, x, key_padding_mask=torch.zeros(LENGTH, 2))),
        "dimensions": message(lambda: call(x, x[:, 0], x)),
        "causal": message(lambda: call(x, x, x, is_causal=True)),
        "nested": message(lambda: call(*[torch.nested.nested_tensor([x[0], x[1, :2]])] * 3)),
    }


def main(lite: Lite, folder: str) -> None:
    mesh = init_device_mesh("cpu", (lite.world_size,), mesh_dim_names=("tensor_parallel",))
    out: dict[str, Any] = {"calls": {name: of_call(name, mesh) for name in CALLS}}
    out["models"] = {
        f"{name}, {way}": of_model(name, mesh, way) for way in WAYS for name in WAYS[way]
    }
    out["held"], out["dropped"] = held(mesh), dropped(mesh)
    out["padding"] = at_padding(mesh)
    out["whole"], out["messages"] = reasons(mesh), messages(mesh)
    Path(folder, f"rank{lite.global_rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    fabric = Lite(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    main(fabric, sys.argv[1])
