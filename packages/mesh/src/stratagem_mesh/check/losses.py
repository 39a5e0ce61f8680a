"""The loss of a comparison, and the inputs of a model that brings an example."""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError
from stratagem.lite import LiteModule
from stratagem_mesh.tensor import search

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module with its arguments."""

_PREDICTS_WORDS = re.compile(r"LM$|LMHeadModel$|ForConditionalGeneration$")


def default_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss of `training_step`, or of the model's output.

    Of an output without a loss, the mean of the squares of its logits, or of its tensors, is taken.

    Raises:
        ConfigurationError: the model returned neither a loss nor a tensor.
    """
    if callable(getattr(model, "training_step", None)):
        own = model.module if isinstance(model, LiteModule) else model
        takes = len(signature(own.training_step).parameters)
        output = model.training_step(*(batch, 0)[:takes])
    elif isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    return loss_of(output)


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output, or the mean of the squares of its logits or tensors.

    Raises:
        ConfigurationError: the output has no tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        loss = getattr(output, "logits", output)
    means: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel():
            means.append(tensor.square().mean() if tensor.ndim else tensor)
        return tensor

    map_tensors(note, loss)
    if not means:
        raise ConfigurationError(
            f"the model returned an object of type {type(output).__name__}, which has no loss: "
            "pass --loss module:function, a function (model, batch) that returns a scalar"
        )
    return torch.stack(means).sum()


def brings_example(model: nn.Module) -> bool:
    """Whether a model has an example of its input, or is or holds a model of transformers."""
    own = getattr(model, "example_input_array", None) is not None
    return own or any(hasattr(part, "dummy_inputs") for part in model.modules())


def example_calls(model: nn.Module, example: Any, device: torch.device) -> list[Call]:
    """Return modules with their arguments: the model, or its parts that bring inputs.

    Args:
        model: the model.
        example: an input of the model. Default: its own, or inputs of models of transformers in it.
        device: the device of the arguments.

    Raises:
        ConfigurationError: the model has no input.
    """
    numbers = torch.Generator().manual_seed(0)
    is_own = example is None and getattr(model, "example_input_array", None) is None
    if example is None and not brings_example(model):
        raise ConfigurationError(
            f"MeshStrategy(check=True) runs {type(model).__name__} before training, and it brings "
            "no example of an input: pass example_input= what forward takes, set "
            "example_input_array of the model, or pass check=False"
        )

    def placed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        if is_own:  # zeros, as a rule
            tensor = torch.randn(tensor.shape, generator=numbers)
        return tensor.to(device, torch.float64)

    calls = []
    for _, part, args, kwargs in search.inputs_of(model, example):
        takes = signature(part.forward).parameters if is_own else {}
        if "labels" in takes and _PREDICTS_WORDS.search(type(part).__name__):
            words = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
            kwargs = {**kwargs, **({} if words is None else {"labels": words})}
        calls.append((part, map_tensors(placed, args), map_tensors(placed, kwargs)))
    return calls
