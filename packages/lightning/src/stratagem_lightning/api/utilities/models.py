"""What Lightning's helpers say of models: gradients, shared parameters, overridden methods."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.module import DataModule, Module
from stratagem.strategies import adopt_compiled, own_module
from stratagem.trainer import is_users
from stratagem_lightning.api.utilities.exceptions import UserTypeError

_OMEGACONF_AVAILABLE, _RICH_AVAILABLE, _TORCHVISION_AVAILABLE = (
    importlib.util.find_spec(name) is not None for name in ("omegaconf", "rich", "torchvision")
)
_PARENTS = (Module, DataModule, Callback)


def is_overridden(
    method_name: str, instance: object | None = None, parent: type | None = None
) -> bool:
    """Return whether an object or its class overrides a method.

    Args:
        method_name: the name of the method.
        instance: the object; with None the result is False.
        parent: the base class of the comparison; None: Module, DataModule or Callback.

    Raises:
        ValueError: the object has no such base class.
    """
    if instance is None:
        return False
    if parent is None:
        found = [base for base in _PARENTS if isinstance(instance, base)]
        if not found:
            raise ValueError(
                f"Expected a parent: {type(instance).__name__} is no Module, DataModule or "
                "Callback, so pass the argument parent"
            )
        parent = found[0]
    own, base = getattr(instance, method_name, None), getattr(parent, method_name, None)
    if own is None:
        return False
    if base is None:
        raise ValueError(f"{parent.__name__} has no method {method_name!r}")
    if isinstance(instance, _PARENTS):
        # A class here may lie between, such as LightningModule.
        return is_users(instance, method_name)
    return getattr(own, "__func__", own) is not base


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Return a model of torchvision by its name, with the arguments that it takes.

    Raises:
        ConfigurationError: torchvision is not installed.
    """
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ConfigurationError(
            f"model_name={model_name!r}: expected torchvision to be installed: pip install "
            "torchvision"
        ) from error
    model: nn.Module = models.get_model(model_name, **kwargs)
    return model


def grad_norm(
    module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, float]:
    """Return the norm of each parameter's gradient and the total norm, by name.

    Args:
        module: the module, with gradients.
        norm_type: the order of the norm, above 0; "inf": the largest value.
        group_separator: the text between the kind of norm and the parameter's name.

    Raises:
        ValueError: the norm is not above 0.
    """
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf', received {norm_type!r}")
    prefix = f"grad_{kind}_norm"
    norms: dict[str, Any] = {
        f"{prefix}{group_separator}{name}": parameter.grad.data.norm(kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        total = torch.stack([norm.reshape(()) for norm in norms.values()]).norm(kind)
        norms[f"{prefix}_total"] = total
    return norms


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one, together."""
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(recurse=False):
            own = names.setdefault(parameter, [])
            full = f"{prefix}.{name}" if prefix else name
            if full not in own:
                own.append(full)
    return [together for together in names.values() if len(together) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Make parameters one again, the first of each list; return the module."""
    for first, *others in shared_params:
        parameter = _attribute(module, first)
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(_attribute(module, owner), own, parameter)
    return module


def _attribute(module: nn.Module, path: str) -> Any:
    return reduce(getattr, path.split("."), module) if path else module


def from_compiled(model: Any) -> Module:
    """Return the Module of a `torch.compile` result, compiled in place.

    Raises:
        ConfigurationError: the result does not contain a Module.
    """
    if isinstance(model, Tensor) or not isinstance(module := own_module(model), Module):
        raise ConfigurationError(
            f"expected what torch.compile has returned for a LightningModule, received "
            f"{type(model).__name__}"
        )
    return module


def maybe_unwrap_optimized(model: Any) -> Module:
    """Return a Module, or the Module of a `torch.compile` result.

    Raises:
        UserTypeError: `model` is another object.
    """
    if isinstance(model, Module):
        return model
    if isinstance(own_module(model), Module):
        return from_compiled(model)
    raise UserTypeError(
        "`model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got "
        f"`{type(model).__qualname__}`"
    )


def to_uncompiled(model: Any) -> Module:
    """Return the Module without compilation; its submodules stay as `torch.compile` left them.

    Raises:
        ConfigurationError: `model` is not a Module.
    """
    module = from_compiled(model)
    adopt_compiled(module)
    module._compiled_call_impl = None
    return module
