"""Optimizers that were made before sharding: they go on with the sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.native.sharding.layout import distribute_like
from stratagem.state.shards import LazyTensor, read_whole


class Rebinding:
    """Takes optimizers from a model's parameters to those that sharding puts in their place.

    Sharding replaces every parameter by another object. An optimizer that keeps the old ones steps
    them without an error, and the model never changes. So the names are noted before, and the new
    parameters are looked up by them afterwards; groups, schedulers and state stay.

    Args:
        module: the model, not sharded yet.
        optimizers: made from its parameters.

    Raises:
        ConfigurationError: an optimizer holds a parameter that the model does not have.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        check_parameters(module, optimizers)
        names = {id(p): name for name, p in module.named_parameters()}
        self._optimizers = [
            (o, [[names[id(p)] for p in group["params"]] for group in o.param_groups])
            for o in optimizers
        ]

    def apply(self, module: nn.Module) -> None:
        """Put the parameters that the model has now into the optimizers."""
        now = dict(module.named_parameters())
        for optimizer, groups in self._optimizers:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for index, name in enumerate(names):
                    before, after = group["params"][index], now[name]
                    group["params"][index] = after
                    if before is not after and before in optimizer.state:
                        state = optimizer.state.pop(before)
                        optimizer.state[after] = distribute_state(state, after)


def distribute_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer state with its tensors sharded as the parameter is."""
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
    """Refuse an optimizer that would step something else than the model's parameters.

    Raises:
        ConfigurationError: says how many parameters are not the model's; or that sharded and whole
            ones are to be stepped by one kernel.
    """
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
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
            joint = [name for name in ("foreach", "fused") if group.get(name)]
            if joint and len({isinstance(p, DTensor) for p in group["params"]}) > 1:
                whole = [p for p in group["params"] if not isinstance(p, DTensor)]
                raise ConfigurationError(
                    f"the {type(optimizer).__name__} was made with {joint[0]}=True, which steps "
                    f"all parameters of a group at once; {len(whole)} of them cannot be sharded "
                    f"(they have no dimension) and the others are: leave {joint[0]} out, or give "
                    "them a group of their own"
                )
