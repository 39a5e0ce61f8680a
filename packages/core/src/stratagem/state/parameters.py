"""References to parameters by identity, which follow when a conversion makes new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError


class ParameterReferences:
    """What refers to a model's parameters as objects: optimizers, and modules that share one.

    `Module.to` mostly changes a parameter's data. To a device whose tensors are of another kind
    than the host's (PrivateUse1, XLA) it makes a new Parameter for each module instead: optimizers
    would go on stepping the old ones, and tied weights would come apart, both without an error.

    Args:
        module: the model, before a conversion.
        optimizers: made from its parameters; what they hold beside these stays as it is.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> references = ParameterReferences(model, [optimizer])
        >>> model.weight = nn.Parameter(model.weight.detach().clone())
        >>> references.restore(model)
        >>> optimizer.param_groups[0]["params"][0] is model.weight
        True
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for attribute, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((owner, attribute))
        self._tied = [places for places in owners.values() if len(places) > 1]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._optimizers = [
            (
                optimizer,
                [[names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups],
            )
            for optimizer in optimizers
        ]

    def restore(self, module: nn.Module) -> None:
        """Tie again what was tied, and put the model's parameters into the optimizers.

        Their state moves to the device of its parameter.

        Raises:
            ConfigurationError: an optimizer's parameter is gone from the model.
        """
        for (first, name), *others in self._tied:
            shared = first._parameters[name]
            for owner, attribute in others:
                if owner._parameters[attribute] is not shared:
                    setattr(owner, attribute, shared)
        now = dict(module.named_parameters())
        for optimizer, groups in self._optimizers:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for index, name in enumerate(names):
                    if not name:
                        continue  # another model's
                    if name not in now:
                        raise ConfigurationError(
                            f"the {type(optimizer).__name__} holds the parameter {name!r}, which "
                            "the model has no longer after its conversion: make the optimizer "
                            "after setup(model)"
                        )
                    _put(optimizer, group["params"], index, now[name])


def _put(optimizer: Optimizer, parameters: list[Any], index: int, after: nn.Parameter) -> None:
    before = parameters[index]
    parameters[index] = after
    if before in optimizer.state:
        state = optimizer.state.pop(before)
        optimizer.state[after] = {
            key: value.to(after.device)
            if isinstance(value, Tensor) and value.shape == after.shape != ()
            else value
            for key, value in state.items()
        }
