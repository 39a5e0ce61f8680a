"""The loss of parts of logits, for tensor_sequence.py and tensor_language.py."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from stratagem.errors import StratagemError
from stratagem_mesh import cross_entropy
from stratagem_mesh.tensor.layers import LossOptions, SequenceOptions, divide_layers

PLAN = {"embedding": "embedding_rowwise", "head": "colwise_vocabulary"}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_gradients(model: nn.Module, alone: nn.Module) -> float:
    own = {name: whole(p.grad) for name, p in model.named_parameters()}
    return max(
        float((own[name] - p.grad).abs().max() / p.grad.abs().max().clamp_min(1e-6))
        for name, p in alone.named_parameters()
        if p.grad is not None
    )


def of_cross_entropy(
    build: Callable[[], nn.Module], tokens: Tensor, mesh: DeviceMesh
) -> dict[str, Any]:
    """Return how far `cross_entropy` of a model is from torch's in one process."""
    alone = build().double()
    model = deepcopy(alone)
    divide_layers(model, mesh, PLAN)
    target = tokens.flatten().roll(-1)
    target[3:9] = -100
    found: dict[str, Any] = {}
    for reduction in ("mean", "sum", "none"):
        for one, kind, function in (
            (model, "part", cross_entropy),
            (alone, "cross_entropy", functional.cross_entropy),
        ):
            one.zero_grad()
            loss = function(one(tokens).flatten(0, 1), target, reduction=reduction)
            torch.autograd.backward((loss * torch.linspace(0.5, 1, loss.numel())).sum())
            found[f"{reduction} of {kind}"] = loss.detach().flatten().tolist()
        found[f"gradients of {reduction}"] = of_gradients(model, alone)
    logits: Any = model(tokens)
    found["part"] = list(logits.to_local().shape)
    by_batch = cross_entropy(logits.transpose(1, 2), target.view(tokens.shape))
    found["by batch"] = by_batch.item()
    found["bfloat16"] = str(cross_entropy(logits.flatten(0, 1).bfloat16(), target).dtype)
    found["messages"] = {
        "bounds": message(lambda: cross_entropy(logits.flatten(0, 1), target + 16)),
        "dimension": message(lambda: cross_entropy(logits, target.view(tokens.shape))),
    }
    model.eval()
    with torch.no_grad():
        found["evaluation"] = float((model(tokens) - alone.eval()(tokens)).abs().max())
    return found


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except (StratagemError, IndexError) as error:
        return str(error)
    return "nothing was raised"


def of_language(build: Callable[[], Any], tokens: Tensor, mesh: DeviceMesh) -> list[float]:
    """Return how far losses, gradients, logits and evaluations of a model are from one process."""
    labels = tokens.clone()
    labels[0, :5] = -100
    items = {"num_items_in_batch": torch.tensor(37)}
    shifted = {"shift_labels": labels.roll(-1, 1)}
    found = []
    for options in ({}, items, shifted, {"return_dict": False}):
        torch.manual_seed(0)
        alone = build().double().train()
        model = deepcopy(alone)
        gathers = "return_dict" in options
        sequence = SequenceOptions() if options else None
        divide_layers(model, mesh, None, sequence=sequence, loss=LossOptions(gathers))
        outputs = [one(input_ids=tokens, labels=labels, **options) for one in (model, alone)]
        for output in outputs:
            torch.autograd.backward(output[0])
        found += [of_gradients(model, alone), abs(outputs[0][0].item() - outputs[1][0].item())]
        if gathers:
            found.append(float((outputs[0][1] - outputs[1][1]).detach().abs().max()))
        with torch.no_grad():
            one, other = (m.eval()(input_ids=tokens, labels=labels) for m in (model, alone))
        found += [float((one[key] - other[key]).abs().max()) for key in ("loss", "logits")]
    return found


def refusals(build: dict[str, Callable[[], Any]], tokens: Tensor, mesh: DeviceMesh) -> Any:
    llama, loss = build["llama"]().train(), LossOptions()
    divide_layers(llama, mesh, None, loss=loss)
    odd, tied = build["llama"](), build["llama"]()
    odd.resize_token_embeddings(65)
    tied.model.norm.weight = tied.lm_head.weight
    return {
        "logits": message(lambda: llama(input_ids=tokens, labels=tokens).logits.shape),
        "own loss": message(lambda: divide_layers(build["bert"](), mesh, None, loss=loss)),
        "tokens": message(lambda: divide_layers(odd, mesh, None, loss=loss)),
        "tied": message(lambda: divide_layers(tied, mesh, None, loss=loss)),
        "function": message(lambda: divide_layers(odd, mesh, lambda *_: None, loss=loss)),
    }
