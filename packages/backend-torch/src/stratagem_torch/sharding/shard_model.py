"""Sharding a model: one pass over its modules, each parameter whole for a short time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.errors import UserCodeError
from stratagem.strategies import StepModule
from stratagem_torch.sharding.deferred import is_put_away, restore
from stratagem_torch.sharding.layout import (
    broadcast_from_first,
    is_replicated,
    keep_whole,
)

_SUCCESSOR = "_stratagem_successor"


def shard_model(
    root: nn.Module,
    groups: Collection[nn.Module],
    shard: Callable[[nn.Module], object],
    device: torch.device,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Give every rank the same parameters, on its device, and shard them group by group.

    Modules are visited in the order of construction, and a group is sharded as soon as all of its
    modules are initialized. Parameters that are initialized here therefore draw the same values as
    in a single process. At any time, at most one group and the parameters of the root are
    unsharded.

    Args:
        root: the model.
        groups: modules in the model that are sharded as groups; includes `root` if the root is to
            be sharded.
        shard: shards a module; called for each group after the groups inside that group.
        device: the device of unsharded parameters.
        replicas: the ranks that have the same modules; None: all ranks.

    Raises:
        UserCodeError: a module is on the meta device and has no method that initializes it.
    """
    chosen, seen = set(groups), set[nn.Module]()

    def visit(part: nn.Module, name: str) -> None:
        if part in seen:
            return
        seen.add(part)
        make_whole(part, device, name=name, replicas=replicas)
        for child_name, child in part.named_children():
            visit(child, "" if isinstance(part, StepModule) else f"{name}.{child_name}".strip("."))
        if part in chosen:
            before = [p for p in part.parameters() if not isinstance(p, DTensor)]
            shard(part)
            kept = {id(p) for p in part.parameters()}
            for parameter in before:
                if id(parameter) not in kept:
                    # An optimizer that was made before may still hold it.
                    parameter.data = parameter.data.new_empty(0)

    visit(root, "")


def make_whole(
    part: nn.Module,
    device: torch.device,
    *,
    name: str,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Initialize a module's own parameters and buffers on the device with the first rank's values.

    Raises:
        UserCodeError: the module is on the meta device and has no `reset_parameters`.
    """
    give_values(part, device, name=name, replicas=replicas)
    for parameter in part._parameters.values():
        if parameter is not None:
            restore(parameter, device)


def give_values(
    part: nn.Module,
    device: torch.device,
    *,
    name: str,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Initialize like `make_whole`, except parameters that were sharded eagerly.

    Raises:
        UserCodeError: see `make_whole`.
    """
    if any(tensor.is_meta for tensor in _own(part)):
        _initialise(part, device, name=name)
    if type(part)._apply is not nn.Module._apply and not part._parameters:
        part.to(device)  # its tensors may be other attributes, as in torchmetrics
    for parameter in part._parameters.values():
        if parameter is not None and _is_whole(parameter):
            _put_on(parameter, device)
            broadcast_from_first([parameter], replicas)
    for key, buffer in part._buffers.items():
        if buffer is not None and _is_whole(buffer):
            part._buffers[key] = shared = buffer.to(device)
            broadcast_from_first([shared], replicas)


def _put_on(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter, which stays the object that optimizers and tied modules hold."""
    moved = parameter.data.to(device).contiguous()
    if torch._has_compatible_shallow_copy_type(parameter.data, moved):
        parameter.data = moved
    else:  # the device's tensors have another type than the host's
        there = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]


def _own(part: nn.Module) -> list[Tensor]:
    own = (*part._parameters.values(), *part._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _is_whole(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) and not is_put_away(tensor)


def _initialise(part: nn.Module, device: torch.device, *, name: str) -> None:
    """Do what the module's constructor would have done elsewhere than on the meta device."""
    if any(isinstance(tensor, DTensor) for tensor in _own(part)):
        # Each rank would draw the same numbers for its part.
        raise UserCodeError(
            f"the module {name or type(part).__name__!r} was divided between ranks on the meta "
            "device, where its parameters have no values to divide: build it in configure_model() "
            "or under Lite.init_module() without the meta device"
        )
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if reset is None:
        raise UserCodeError(
            f"the module {name or type(part).__name__!r} ({type(part).__name__}) is on the meta "
            "device and has no method reset_parameters(), so its parameters and buffers cannot be "
            "given values: add one, or build the model in configure_model() or under "
            "Lite.init_module() without the meta device, where every constructor just works"
        )
    before = dict(part._parameters)
    part.to_empty(device=device, recurse=False)
    reset()
    # Leaving the meta device made other parameters, each module its own: tied ones are tied again.
    for key, parameter in before.items():
        if parameter is not None:
            if hasattr(parameter, _SUCCESSOR):
                part._parameters[key] = getattr(parameter, _SUCCESSOR)
            else:
                setattr(parameter, _SUCCESSOR, made := part._parameters[key])
                if made is not None and is_replicated(parameter):
                    keep_whole(made)


def free_casts(groups: Collection[nn.Module]) -> None:
    """Free autocast's copies of a group's parameters after the group's forward pass.

    Autocast keeps them until the whole forward pass ends, when every group would have its copies.
    """
    for group in groups:
        group.register_forward_hook(_free_casts)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _free_casts(*_: Any) -> None:
    """Free the casts of a group's parameters, which autocast keeps until the forward pass ends."""
    torch.clear_autocast_cache()
