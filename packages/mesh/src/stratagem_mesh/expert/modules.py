"""Which modules of a model are experts, and which of them ranks cannot divide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import Parameter, signature

from torch import nn

from stratagem.errors import ConfigurationError

_CONVENTION = "down_proj"
"""The parameter of (expert, ...) that each module of experts of transformers has."""

_WRITE = (
    "expected a module with parameters of (expert, in, out) and "
    "forward(tokens, experts, weights), in which experts and weights are (tokens, experts of a "
    "token)"
)


def find_experts(model: nn.Module, names: Sequence[str] | None, size: int) -> dict[str, nn.Module]:
    """Return the modules of experts that ranks divide, by name.

    Args:
        model: has the modules.
        names: the user's names of them, in which `*` stands for a number; the beginning may be left
            out. Default: modules that follow the convention of transformers.
        size: the number of ranks.

    Raises:
        ConfigurationError: the model has no experts, or ranks cannot divide them.
    """
    found = _of_convention(model) if names is None else _named(model, names)
    if not found:
        raise ConfigurationError(
            f"expert={size}, but {type(model).__name__} has no experts of transformers"
            f"{_list_of_modules(model)}: pass expert_modules=['NAME'], {_WRITE}; or expert=1"
        )
    for name, module in found.items():
        _check(name, module, size)
    return found


def number_of_experts(module: nn.Module) -> int:
    """Return the first dimension of the parameters of a module; 0 if they differ or are none."""
    own = [p for p in module._parameters.values() if p is not None and p.ndim]
    first = {parameter.shape[0] for parameter in own}
    return first.pop() if len(first) == 1 else 0


def _of_convention(model: nn.Module) -> dict[str, nn.Module]:
    found = {}
    for name, part in model.named_modules():
        parameter = part._parameters.get(_CONVENTION)
        if parameter is not None and parameter.ndim == 3:
            found[name] = part
    return found


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in names:
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        matches = [name for name in modules if re.fullmatch(rf"(.+\.)?{expression}", name)]
        if not matches:
            known = [name for name in modules if "expert" in name] or [*modules][1:]
            raise ConfigurationError(
                f"expert_modules has {pattern!r}, which names no module of "
                f"{type(model).__name__}: expected names such as "
                f"{', '.join(map(repr, known[:4]))}"
            )
        found.update({name: modules[name] for name in matches})
    return found


def _list_of_modules(model: nn.Module) -> str:
    """Return a remark on experts that are modules of their own, or ""."""
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and "expert" in name:
            return (
                f", and {name!r} is a ModuleList of {len(part)} experts, which a loop of the model "
                "calls one by one"
            )
    return ""


def _check(name: str, module: nn.Module, size: int) -> None:
    """Raise if ranks cannot divide a module.

    Raises:
        ConfigurationError: names the module.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        raise ConfigurationError(
            f"expert_modules has {name!r}, a {type(module).__name__} of {len(module)} modules, "
            f"whose tokens are divided before it is called: {_WRITE}"
        )
    if name.rpartition(".")[2] == "base_layer":
        raise ConfigurationError(
            f"{name!r} is wrapped by an adapter, which computes its weights from parameters of "
            "their own: expected adapters of other layers than experts, or expert=1"
        )
    takes = [
        p
        for p in signature(module.forward).parameters.values()
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [p for p in takes[3:] if p.default is Parameter.empty]
    if len(takes) < 3 or needed:
        said = ", ".join(p.name for p in takes)
        raise ConfigurationError(
            f"the experts {name!r} ({type(module).__name__}) have forward({said}): {_WRITE}"
        )
    shapes = {k: tuple(p.shape) for k, p in module._parameters.items() if p is not None and p.ndim}
    count = number_of_experts(module)
    if not count:
        said = ", ".join(f"{key} of {shape}" for key, shape in shapes.items()) or "no parameters"
        raise ConfigurationError(
            f"the experts {name!r} ({type(module).__name__}) have {said}, whose first dimensions "
            f"are not one number of experts: {_WRITE}; others belong in a module inside of it"
        )
    if count % size:
        raise ConfigurationError(
            f"{name!r} has {count} experts, which do not divide between {size} ranks: choose a "
            f"size of expert= that divides {count}"
        )
