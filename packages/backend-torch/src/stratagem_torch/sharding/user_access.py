"""What user code does with a sharded model outside its forward pass: calls it, or changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stratagem.errors import UserCodeError

_OF_SHARDS = (
    *("mixed torch.Tensor", "invalid python storage", "does not have a sharding strategy"),
    "not supported for tensor subclasses",
)


def groups_of(part: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of one module; torch 2.13 has several in a module.

    Args:
        part: a module that `fully_shard` was called with.

    Example:
        >>> import inspect
        >>> from stratagem_torch.sharding import groups_of
        >>> list(inspect.signature(groups_of).parameters)
        ['part']
    """
    state: Any = part._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [*filter(None, [state._fsdp_param_group])]


def gather_when_called(root: FSDPModule, model: nn.Module) -> None:
    """Let hooks call the user's model without gradients, for example to sample from it.

    The parameters outside of groups are gathered in the forward pass of `root`, which such a call
    does not run. Every rank makes the call.
    """
    gathered: list[bool] = []

    def before(*_: Any) -> None:
        gathered.append(not torch.is_grad_enabled() and any(g.is_sharded for g in groups_of(root)))
        if gathered[-1]:
            root.unshard()

    def after(*_: Any) -> None:
        if gathered.pop():
            root.reshard()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


def keep_for_second_backward(parts: Iterable[FSDPModule]) -> None:
    """Let a backward that is differentiated itself (`create_graph=True`) keep parameters gathered.

    The second backward computes with them.
    """
    for group in (group for part in parts for group in groups_of(part)):
        group.pre_backward = _keeping(group, group.pre_backward)


def _keeping(group: Any, prepare: Callable[..., None]) -> Callable[..., None]:
    keeps = False

    def prepare_and_keep(*arguments: Any) -> None:
        nonlocal keeps
        if torch.is_grad_enabled() and group.reshard_after_backward:
            keeps, group.reshard_after_backward = True, False
        elif keeps and not torch.is_grad_enabled():
            keeps, group.reshard_after_backward = False, True
        prepare(*arguments)

    return prepare_and_keep


_WATCHED = "_stratagem_watched"


class OwnBackward:
    """The backward passes of strategies in this process.

    Attributes:
        runs: whether one runs now; in any thread, since autograd has one for each device.
    """

    runs = False


def refuse_other_backward(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a backward other than the strategy's reaches unsharded parameters.

    Such a backward does not average the gradients, so that ranks would train different parameters.

    Args:
        module: the model.
        parameters: the parameters that stay unsharded.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter in parameters:
        if id(parameter) not in names or hasattr(parameter, _WATCHED):
            continue

        def check(found: nn.Parameter, name: str = names[id(parameter)]) -> None:
            if not OwnBackward.runs:
                found.grad = None
                raise UserCodeError(
                    f"loss.backward() gave the parameter {name!r} a gradient of this rank alone: "
                    "the parameter is whole on every rank, and only self.manual_backward(loss) "
                    "(lite.backward(loss) under Lite) averages its gradients over ranks"
                )

        trains = parameter.requires_grad
        # torch registers hooks on parameters with a gradient only, and keeps them afterwards.
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)
        setattr(parameter, _WATCHED, True)


def read_whole_numbers() -> None:
    """Let `item()` and `float()` return the number over all ranks, on every rank, in this process.

    By default, `float(parameter.norm())` is the norm of this rank's shard.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = lambda _, args, kwargs: (
        args[0].detach().full_tensor().item()
    )


def check_changes(parts: Iterable[FSDPModule]) -> None:
    """Check that user code has changed no parameter in a way that FSDP2 does not notice.

    Raises:
        UserCodeError: names the parameter.
    """
    for group in (group for part in parts for group in groups_of(part)):
        for parameter in group.fsdp_params:
            name = str(parameter._param_fqn).removeprefix("module.")
            info, shard = parameter._module_info, parameter.sharded_param
            registered = getattr(info.module, info.param_name)
            if group.is_unsharded and _differs_from_shard(parameter, registered):
                raise UserCodeError(
                    f"the parameter {name!r} was changed between the forward and the backward "
                    "pass. FSDP2 frees this gathered copy, so the change would be lost: change "
                    "parameters in on_train_batch_start, on_train_batch_end or later"
                )
            # The address of a DTensor is 0.
            if (group.is_sharded and registered is not shard) or shard.data_ptr():
                raise UserCodeError(
                    f"the sharded parameter {name!r}, or its `.data`, was replaced by another "
                    "tensor, which FSDP2 does not use: change the parameter in place, under "
                    "torch.no_grad(), for example by parameter.copy_(torch.distributed.tensor."
                    "distribute_tensor(values, parameter.device_mesh, parameter.placements))"
                )


def _differs_from_shard(parameter: Any, registered: Any) -> bool:
    """Return whether this rank's part of a gathered parameter differs from its shard."""
    whole, shard = parameter._unsharded_param, parameter.sharded_param._local_tensor
    if registered is not whole:
        return True
    whole = getattr(whole, "_local_tensor", whole)  # of a DTensor, where layers are divided too
    if isinstance(whole, FakeTensor) or hasattr(shard, "fsdp_post_all_gather"):
        return False
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    size = -(-whole.shape[dim] // mesh.shard_mesh_size)
    start = min(mesh.shard_mesh_rank * size, whole.shape[dim])
    own = whole.detach().narrow(dim, start, shard.shape[dim])
    shard = shard.detach().to(own.device, own.dtype)
    # By bits, since NaN differs from NaN.
    return not torch.equal(*(one.contiguous().view(torch.uint8) for one in (own, shard)))


def explain_shards(error: RuntimeError) -> UserCodeError | None:
    """Return a clearer error where code met shards that needs whole tensors; None for others."""
    if not any(text in str(error) for text in _OF_SHARDS):
        return None
    return UserCodeError(
        "a sharded parameter (a DTensor) was used where a whole tensor is needed: outside of its "
        "forward pass a model has shards. Call the model itself rather than its layers, under "
        "torch.no_grad(), on every rank; read or save whole weights as parameter.full_tensor(), "
        "on every rank; or convert a plain tensor by torch.distributed.tensor.distribute_tensor("
        "tensor, parameter.device_mesh, parameter.placements). With manual optimization call "
        "children of the Module as modules, self.net(x); for another method of a child, call "
        "torch.distributed.fsdp.register_fsdp_forward_method(self.net, 'method') in on_fit_start"
    )
