"""Between whole tensors and shards (DTensors): tensors, state, optimizers, and what stays whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from stratagem.checkpoint import LazyTensor, Shards, read_whole
from stratagem.errors import ConfigurationError


def distribute_like(pattern: Tensor, whole: Tensor | LazyTensor) -> Tensor:
    """Return a tensor sharded as `pattern` is.

    The function does not communicate. The chunk of this rank is a copy, so that it keeps neither
    the source tensor nor its memory-mapped file alive.

    Args:
        pattern: a parameter, sharded or not.
        whole: the unsharded tensor, of the same shape; every rank has it, or reads its chunk from
            it.

    Example:
        >>> import torch
        >>> distribute_like(torch.zeros(2), torch.ones(2))  # of a parameter that is not sharded
        tensor([1., 1.])
    """
    if not isinstance(pattern, DTensor):
        return whole.whole() if isinstance(whole, LazyTensor) else whole
    if isinstance(whole, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        pattern.shape, pattern.device_mesh, pattern.placements
    )
    region = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
    # With shards in host memory as well: DTensor.from_local would move them to the device.
    result = torch.empty_like(pattern.detach(), dtype=whole.dtype)
    mine = result.to_local()  # type: ignore[attr-defined]
    if isinstance(whole, LazyTensor):
        whole.read_into(Shards(whole.shape, whole.dtype, [(tuple(offset), mine)]))
    elif mine.numel():
        mine.copy_(whole[region])
    return result


def shards_of(value: Any) -> Any:
    """Return this rank's shards of a sharded tensor, aliased; other values are unchanged.

    Example:
        >>> import torch
        >>> shards_of(torch.ones(2))  # which is not sharded
        tensor([1., 1.])
    """
    if not isinstance(value, DTensor):
        return value
    local = value.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    chunks = [(tuple(offset), local)] if local.numel() else []
    return Shards(tuple(value.shape), value.dtype, chunks) if value.numel() else local


@lru_cache
def _silence_advice() -> None:
    """Leave out torch's advice on gathering over two mesh dimensions, which nobody can follow."""
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
        lambda record: "sequential all_gather operations" not in record.getMessage()
    )


def whole_on_cpu(value: Any) -> Any:
    """Return a whole copy of a tensor on the CPU; every rank takes part.

    What is no tensor is returned as it is.

    Example:
        >>> import torch
        >>> whole_on_cpu(torch.ones(2))
        tensor([1., 1.])
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        _silence_advice()
        value = value.full_tensor()
    # A tensor that is not spread over ranks comes back as the live one.
    return value.to("cpu", copy=True)


class Rebinding:
    """Moves optimizers from a model's original parameters to the sharded parameters.

    Sharding replaces every parameter by another object. An optimizer with the old objects would
    step them without an error, and the model would never change. So this class records the names
    of parameters before sharding, and looks up the new parameters by name afterwards. Parameter
    groups, schedulers and state stay.

    Args:
        module: the model, not sharded yet.
        optimizers: optimizers of its parameters.

    Raises:
        ConfigurationError: if an optimizer holds a parameter that the model does not have.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        check_parameters(module, optimizers)
        names = {id(p): name for name, p in module.named_parameters()}
        self._optimizers = [
            (o, [[names[id(p)] for p in group["params"]] for group in o.param_groups])
            for o in optimizers
        ]

    def apply(self, module: nn.Module, local_names: Mapping[str, str | None]) -> None:
        """Put the parameters that the model has now into the optimizers.

        Args:
            module: the model, sharded.
            local_names: the names on this rank of the parameters with another name there; None: the
                parameter is not on this rank.
        """
        now = dict(module.named_parameters())
        for optimizer, groups in self._optimizers:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                given, group["params"] = group["params"], []
                for before, name in zip(given, names, strict=True):
                    here = local_names.get(name, name)
                    if here is None:
                        optimizer.state.pop(before, None)
                        continue
                    after = now[here]
                    group["params"].append(after)
                    if before is not after and before in optimizer.state:
                        state = optimizer.state.pop(before)
                        optimizer.state[after] = distribute_state(state, after)


def distribute_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer state with its tensors sharded as the parameter is.

    Example:
        >>> import torch
        >>> distribute_state({"step": 3}, torch.zeros(2))
        {'step': 3}
    """
    like_parameter = {
        name
        for name, value in state.items()
        if isinstance(value, (Tensor, LazyTensor)) and value.shape == parameter.shape != ()
    }
    return {
        name: distribute_like(parameter, value) if name in like_parameter else read_whole(value)
        for name, value in state.items()
    }


def check_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer would step other tensors than the model's parameters.

    If a group mixes sharded and whole parameters, the optimizer steps each by itself: torch refuses
    to step the mixture at once, its default on a GPU.

    Raises:
        ConfigurationError: some parameters do not belong to the model (the message has their
            number); a kernel would step sharded and unsharded parameters together; or the
            optimizer's state cannot be sharded.
    """
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        _check_state_is_sharded(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(id(p) not in own for p in held)
        if strangers:
            raise ConfigurationError(
                f"the {type(optimizer).__name__} holds {strangers} of {len(held)} parameters that "
                "the model does not have (any more), so that stepping it would change nothing: "
                "make it from model.parameters(), after everything that replaces parameters "
                "(building the model again, configure_model)"
            )
        for group in optimizer.param_groups:
            if len({isinstance(p, DTensor) for p in group["params"]}) < 2:
                continue
            joint = [name for name in ("foreach", "fused") if group.get(name)]
            if "foreach" in group and not joint:
                group["foreach"] = False
            if joint:
                whole = [p for p in group["params"] if not isinstance(p, DTensor)]
                raise ConfigurationError(
                    f"the {type(optimizer).__name__} was made with {joint[0]}=True, which steps "
                    f"all parameters of a group at once; {len(whole)} of them cannot be sharded "
                    "(they have no dimension or elements, or are in no layer) and the others are: "
                    f"leave {joint[0]} out, or give them a group of their own"
                )


_PACKED = re.compile(r"torchao\.optim\..*(4bit|8bit|Fp8)|bitsandbytes\.optim\..*")
"""Optimizers whose kernels take no shards, or whose shards of state no checkpoint can hold."""


def packed_state_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer of torchao or bitsandbytes that packs its state; or ""."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__]
    packed = next(filter(_PACKED.fullmatch, names), "")
    library, _, kind = packed.partition(".optim.")
    return packed and f"{library}.optim.{kind.rpartition('.')[2]}"


def _check_state_is_sharded(optimizer: Optimizer) -> None:
    """Raise for an optimizer of which a shard of the state cannot be stepped or saved.

    Raises:
        ConfigurationError: the message has the name of the optimizer.
    """
    if packed := packed_state_of(optimizer):
        raise ConfigurationError(
            f"{packed} packs its state in a form that cannot be divided over ranks and saved: use "
            "stratagem_extras.optimizers.AdamW8bit, whose 8-bit state is sharded here as that of "
            "torch.optim is, or strategy='ddp', where each rank has the whole state"
        )


_WHOLE = "_stratagem_whole"


def keep_whole(parameter: nn.Parameter) -> None:
    """Let a parameter stay whole on every rank.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> is_replicated(weight)
        False
        >>> keep_whole(weight)
        >>> is_replicated(weight)
        True
    """
    setattr(parameter, _WHOLE, True)


def is_replicated(parameter: nn.Parameter) -> bool:
    """Whether a parameter stays whole: by `keep_whole`, or without a dimension or elements.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> is_replicated(weight)
        False
        >>> keep_whole(weight)
        >>> is_replicated(weight)
        True
    """
    return parameter.ndim == 0 or not parameter.numel() or hasattr(parameter, _WHOLE)


def find_replicated(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that stay whole, such as a learned temperature.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> keep_whole(layer.bias)
        >>> find_replicated(layer) == [layer.bias]
        True
    """
    return [p for p in module.parameters() if is_replicated(p)]


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of a group the values of its first rank, in place; None: of all ranks."""
    for tensor in tensors:
        values = tensor.detach()
        whole = values.contiguous()
        dist.broadcast(whole, group=group, group_src=0)
        if whole is not values:
            values.copy_(whole)


def average_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup | None = None,
    count: int | None = None,
) -> None:
    """Replace the gradients by their mean over ranks, in one collective.

    A rank that did not use a parameter counts as a zero; a parameter that no rank used stays
    without a gradient. An average stays the same, so that gradients may be accumulated with and
    without this.

    Args:
        parameters: the same ones on each rank; a DTensor counts by its local tensor.
        group: the ranks; None: all.
        count: the number by which the sum is divided; None: the number of ranks.

    Example:
        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([2.0, 4.0])
        >>> average_gradients([weight], count=2)
        >>> weight.grad
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    wanted = [p for p in parameters if p.requires_grad]
    if not wanted:
        return
    dtype = reduce(torch.promote_types, (p.dtype for p in wanted), torch.float32)
    sizes = [local_tensor(p).numel() for p in wanted]
    message = torch.zeros(len(wanted) + sum(sizes), dtype=dtype, device=wanted[0].device)
    used, *sums = torch.split(message, [len(wanted), *sizes])
    for index, (parameter, whole) in enumerate(zip(wanted, sums, strict=True)):
        if parameter.grad is not None:
            whole.copy_(local_tensor(parameter.grad).reshape(-1))
            used[index] = 1.0
    dist.all_reduce(message, group=group)
    message[len(wanted) :] /= dist.get_world_size(group) if count is None else count
    for parameter, mean, users in zip(wanted, sums, used.tolist(), strict=True):
        if not users:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = mean if parameter.is_complex() else mean.real
        gradient = local_tensor(parameter.grad)
        gradient.copy_(own.view_as(gradient))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, aliased; another tensor is returned as it is.

    Example:
        >>> import torch
        >>> local_tensor(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
