"""The parts of a model that are sharded each by itself, since user code runs backward in between.

With manual optimization, `training_step` calls parts of the Module and runs backward. FSDP2
prepares the reduction of gradients at the end of a forward pass. So the Module itself is not
sharded: each of its parts has a forward pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from stratagem.strategies import StepModule
from stratagem_torch.sharding.layout import keep_whole


def find_roots(module: nn.Module) -> list[nn.Module]:
    """Return the modules to shard as roots; parameters outside of these modules stay unsharded.

    Args:
        module: the model that a strategy prepares.
    """
    if not isinstance(module, StepModule) or not module.runs_backward:
        return [module]
    parts = _parts_of(module.module)
    _keep_whole_outside(module.module, parts)
    return parts


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model, which have no module in common.

    These are the model's children, or the elements of children without a `forward`, such as lists.
    A child that contains another one, or has a module in common with it, is divided likewise.
    """
    parts = list(dict.fromkeys(_called_in(model)))
    while divided := _overlapping(parts):
        found = [_called_in(part) if part in divided else [part] for part in parts]
        parts = list(dict.fromkeys(part for of_part in found for part in of_part))
    return [part for part in parts if next(part.parameters(), None) is not None]


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_in(child)
        else:
            yield child


def _overlapping(parts: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the parts that contain another part; without such, those with a module in common."""
    owners: dict[nn.Module, list[nn.Module]] = {}
    for part in parts:
        for module in part.modules():
            owners.setdefault(module, []).append(part)
    containers = {owner for part in parts for owner in owners[part] if owner is not part}
    return containers or {part for found in owners.values() if len(found) > 1 for part in found}


def _keep_whole_outside(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Let parameters that are in no part, or in several ones, stay whole."""
    owners: dict[nn.Parameter, int] = {}
    for part in parts:
        for parameter in part.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    for parameter in model.parameters():
        if owners.get(parameter) != 1:
            keep_whole(parameter)
