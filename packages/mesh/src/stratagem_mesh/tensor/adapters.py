"""Layers with adapters of PEFT: a divided base layer, and the matrix beside it that is divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.tensor.region import Region

_WHOLE = "colwise_gather_output", "embedding_rowwise"
"""Styles of layers whose inputs and outputs are whole, so that an adapter stays whole."""


def with_adapters(model: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """Return styles in which layers with LoRA are divided.

    Of `base(x) + B(A(x))`, the base layer gets the style. B has the output features of a colwise
    layer and is divided like this layer; A has the input features of a rowwise layer. The other
    matrix stays whole.

    Raises:
        ConfigurationError: an adapter of another kind is in the place of a layer.
    """
    found: dict[str, Any] = {}
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if not hasattr(layer, "base_layer"):
            found[name] = style
            continue
        _refuse(name, layer, style)
        found[f"{name}.base_layer"] = style
        matrix = "lora_A" if style == "rowwise" else "lora_B"
        if style not in _WHOLE:
            adapters = getattr(layer, matrix)
            found.update({f"{name}.{matrix}.{adapter}": style for adapter in adapters})
    return found


def _refuse(name: str, layer: Any, style: Any) -> None:
    if not hasattr(layer, "lora_A") or getattr(layer, "lora_variant", None):
        variants = getattr(layer, "lora_variant", {}).values()
        kind = next((type(one).__name__ for one in variants), type(layer).__name__)
        raise ConfigurationError(
            f"{name!r} has an adapter of the kind {kind} ({type(layer).__module__}), which the "
            "tensor axis does not divide: expected LoRA without variants, target_modules without "
            "divided layers, or tensor=1"
        )
    if isinstance(layer.base_layer, nn.MultiheadAttention):
        raise ConfigurationError(
            f"tensor_plan divides {name!r} by {style!r}, and it has a LoRA adapter, which reads "
            "the whole weights of nn.MultiheadAttention: expected a tensor_plan without it"
        )
    if not isinstance(style, str):
        raise ConfigurationError(
            f"tensor_plan divides {name!r} by {type(style).__name__}, and it has a LoRA adapter: "
            "expected the name of a style, such as 'colwise', which divides the adapter too"
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let base layers take the place of layers with LoRA, as the search for pairs of layers needs.

    A layer and its adapter are divided alike, so the base layer decides for both.
    """
    replaced = []
    for parent in list(model.modules()):
        for child, layer in parent._modules.items():
            if hasattr(layer, "base_layer") and hasattr(layer, "lora_A"):
                replaced.append((parent, child, layer))
    for parent, child, layer in replaced:
        parent._modules[child] = layer.base_layer  # type: ignore[union-attr,assignment]
    try:
        yield
    finally:
        for parent, child, layer in replaced:
            parent._modules[child] = layer


def watch_dropout(model: nn.Module, styles: Mapping[str, Any], region: Region) -> None:
    """Let adapters drop the same features on all ranks, or of divided inputs each rank its own.

    Args:
        model: the model; its layers may have adapters.
        styles: the style of each divided layer, of base layers too.
        region: the state that the divided layers share.
    """
    for name, style in styles.items():
        wrapper = name.removesuffix(".base_layer")
        if wrapper == name or style in _WHOLE:
            continue
        layer: Any = model.get_submodule(wrapper)
        for dropout in layer.lora_dropout.values():
            if not isinstance(dropout, nn.Identity):
                _watch(dropout, region, is_divided=style == "rowwise")


def _watch(dropout: nn.Module, region: Region, *, is_divided: bool) -> None:
    enter, leave = (region.begin, region.end) if is_divided else (region.pause, region.resume)
    dropout.register_forward_pre_hook(lambda layer, inputs: enter(layer))
    dropout.register_forward_hook(lambda *_: leave(), always_call=True)
