"""Layers of a model that are to compute in another way: found, and made to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategies import user_module

MULTIPLE = 16
"""What float8 kernels want both sizes of a weight to be a multiple of."""
FLOAT8_LINEAR = f"torch.nn.Linear whose two sizes are multiples of {MULTIPLE}"


def as_names(given: Any) -> frozenset[str]:
    """Return the names of modules that a user has passed as a set.

    Raises:
        ConfigurationError: the value does not consist of names.
    """
    names = [given] if isinstance(given, str) else given
    try:
        found = frozenset(names)
    except TypeError:
        found = frozenset({None})
    if not all(isinstance(name, str) and name for name in found):
        raise ConfigurationError(
            f"ignore_modules={given!r}: expected names of modules, as named_modules() has them, "
            "such as {'lm_head'}"
        )
    return found


Layer = TypeVar("Layer", bound=nn.Module)


def find_layers(
    module: nn.Module, kind: type[Layer], ignore_modules: Collection[str]
) -> dict[str, Layer]:
    """Return the layers of exactly one class in a model, by name.

    A subclass may compute anything, so subclasses are left out.

    Args:
        module: the model, in a StepModule or not.
        kind: the class, such as torch.nn.Linear.
        ignore_modules: names of modules that are left out, with their submodules.

    Raises:
        ConfigurationError: the model lacks a module of `ignore_modules`.
    """
    names = dict(user_module(module).named_modules())
    unknown = sorted(set(ignore_modules) - names.keys())
    if unknown:
        known = ", ".join(sorted(name for name in names if name)[:20])
        raise ConfigurationError(
            f"ignore_modules names {unknown[0]!r}, which the model does not have: expected one of "
            f"{known or '(none: it is one layer)'}"
        )
    return {
        name: part
        for name, part in names.items()
        if type(part) is kind and not _is_within(name, ignore_modules)
    }


def find_float8_linear(module: nn.Module, ignore_modules: Collection[str]) -> list[nn.Linear]:
    """Return a model's linear layers of sizes that float8 kernels take; see `find_layers`."""
    return find_linear_of(module, ignore_modules, MULTIPLE)


def find_linear_of(
    module: nn.Module, ignore_modules: Collection[str], multiple: int
) -> list[nn.Linear]:
    """Return a model's linear layers with sizes that are multiples of a number.

    Args:
        module, ignore_modules: as for `find_layers`.
        multiple: the number.
    """
    return [
        layer
        for layer in find_layers(module, nn.Linear, ignore_modules).values()
        if layer.in_features % multiple == layer.out_features % multiple == 0
    ]


def find_adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that PEFT has added to a model, such as LoRA modules.

    A layer of PEFT names the attributes that hold them in `adapter_layer_names`.

    Args:
        module: the model.
    """
    for part in module.modules():
        for name in getattr(part, "adapter_layer_names", ()):
            held = getattr(part, name, None)
            if isinstance(held, nn.Module):
                yield from held.modules()


def become(layer: nn.Module, kind: type[Layer], state: Mapping[str, Any] | None = None) -> Layer:
    """Change a layer's class in place, as `fully_shard` does; return the layer.

    A new module would lack the hooks of the layer, and references to the layer would refer to an
    unused module.

    Args:
        layer: the layer to change.
        kind: its new class.
        state: attributes of the new class; existing attributes of the layer are kept.
    """
    for name, value in (state or {}).items():
        vars(layer).setdefault(name, value)
    layer.__class__ = kind
    assert isinstance(layer, kind)
    return layer


def _is_within(name: str, modules: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in modules)


def warn_unless_converted(
    module: nn.Module, precision: str, is_converted: Callable[[nn.Module], bool], wanted: str
) -> None:
    """Warn if a model has no layer that computes in the requested precision.

    Args:
        module: the model, after its conversion.
        precision: its name.
        is_converted: whether a layer computes in it.
        wanted: which layers are converted, for the message.
    """
    if not any(map(is_converted, module.modules())):
        warnings.warn(
            f"precision={precision!r} has converted nothing, so the model computes as it would "
            f"without it: the model has no {wanted}",
            stacklevel=2,
        )
