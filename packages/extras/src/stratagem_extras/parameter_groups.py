"""Parameter groups of an optimizer, chosen by patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError


def parameter_groups(
    model: nn.Module,
    rules: Mapping[str, Mapping[str, Any]],
    *,
    lr: float | None = None,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Return groups for an optimizer, with options by the names of parameters.

    Frozen parameters belong to no group. A strategy that shards parameters keeps their names, so
    the groups are the same under each strategy.

    Args:
        model: the model; in `configure_optimizers`, `self`.
        rules: options of a group, by a pattern of names: `{"*.bias": {"weight_decay": 0.0}}`.
            `*` stands for any text, also with dots. If several patterns match a name, the later one
            decides.
        lr: the learning rate of the last layer; needed for `layer_decay`.
        layer_decay: the factor of the learning rate from a layer to the one before it. Layers are
            counted by the first number in a name. Parameters before the first layer, such as
            embeddings, have one factor more than that layer. Parameters after the last layer have
            no factor. A rule's own "lr" takes the place of `lr`.

    Returns:
        Groups with "params", "names" (a list) and their options, in the order of the model.

    Raises:
        ConfigurationError: a pattern matches no parameter, or `layer_decay` has no learning rate or
            finds no layer.

    Example:
        >>> import torch
        >>> from stratagem_extras.parameter_groups import parameter_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> groups = parameter_groups(model, {"*.bias": {"weight_decay": 0.0}}, lr=0.1,
        ...                           layer_decay=0.5)
        >>> [(group["names"], group["lr"]) for group in groups]
        [(['0.weight'], 0.05), (['0.bias'], 0.05), (['1.weight'], 0.1), (['1.bias'], 0.1)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in named):
            near = get_close_matches(pattern, named, 3, 0.3) or list(named)[:4]
            raise ConfigurationError(
                f"the pattern {pattern!r} matches no trained parameter of {type(model).__name__}: "
                f"expected a pattern of names such as {', '.join(map(repr, near))}"
            )
    factors = _layer_factors(named, layer_decay)
    if factors and lr is None:
        raise ConfigurationError(
            f"layer_decay={layer_decay!r} without a learning rate: pass lr=, that of the last layer"
        )
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        options: dict[str, Any] = {} if lr is None else {"lr": lr}
        for pattern, chosen in rules.items():
            if fnmatchcase(name, pattern):
                options.update(chosen)
        if factors:
            options["lr"] *= factors[name]
        group = groups.setdefault(repr(options), {"params": [], "names": [], **options})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _layer_factors(names: Iterable[str], decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each name; {} without a decay.

    Raises:
        ConfigurationError: no name has a number.
    """
    if decay == 1.0:
        return {}
    numbers: dict[str, int | None] = {
        name: next((int(part) for part in name.split(".") if part.isdigit()), None)
        for name in names
    }
    layers = [number for number in numbers.values() if number is not None]
    if not layers:
        raise ConfigurationError(
            f"layer_decay={decay!r}: no name has a number, such as 'layers.0.weight', by which "
            "layers are counted: leave layer_decay out, and give an lr by rules"
        )
    last = max(layers)
    before = set(takewhile(lambda name: numbers[name] is None, numbers))
    steps = {name: last - number for name, number in numbers.items() if number is not None}
    return {name: decay ** (last + 1 if name in before else steps.get(name, 0)) for name in numbers}
