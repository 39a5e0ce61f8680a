"""Weights and optimizer state by parameter name, so that any strategy can load them.

The format is the one of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}, ...]}`. It is made
here because that function takes 0.7 s to import and, before the first step, changes training (it
runs a hidden step to make the state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import CheckpointMismatchError
from stratagem.interfaces.shards import SavedTensor


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the optimizer's state with names of `module`'s parameters in the place of indices.

    Raises:
        CheckpointMismatchError: the optimizer holds a parameter that the module does not.
    """
    names = _names_by_index(optimizer, module)
    state = optimizer.state_dict()
    return {
        "state": {names[index]: entry for index, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_named_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `named_state` returned; groups are matched by their parameters' names.

    Raises:
        CheckpointMismatchError: the groups hold other parameters; says which.
    """
    names = _names_by_index(optimizer, module)
    saved_groups = state["param_groups"]
    groups = optimizer.state_dict()["param_groups"]
    matched = []
    for group in groups:
        wanted = [names[index] for index in group["params"]]
        for saved in saved_groups:
            if sorted(saved["params"]) == sorted(wanted):
                matched.append({**saved, "params": group["params"]})
                break
        else:
            there = [saved["params"] for saved in saved_groups]
            raise CheckpointMismatchError(
                f"the checkpoint's optimizer has no parameter group of {_some(wanted)}; its groups "
                f"are {'; '.join(_some(params) for params in there) or 'none'}: use the optimizer "
                "and the parameter groups that it was saved with"
            )
    indices = {name: index for index, name in names.items()}
    optimizer.load_state_dict(
        {
            "state": {
                indices[name]: entry for name, entry in state["state"].items() if name in indices
            },
            "param_groups": matched,
        }
    )


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load weights by name, after checking that they fit.

    Args:
        module: receives them.
        state: tensors by name.
        strict: refuse missing and unexpected names; shapes are checked in any case.

    Raises:
        CheckpointMismatchError: lists missing and unexpected names and differing shapes.
    """
    own = module.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = [
        f"{name} {tuple(state[name].shape)} (the model has {tuple(own[name].shape)})"
        for name in own
        if name in state
        and isinstance(own[name], Tensor)
        and isinstance(state[name], (Tensor, SavedTensor))
        and own[name].shape != state[name].shape
    ]
    problems = []
    if strict and missing:
        problems.append(f"it lacks {_some(missing)}")
    if strict and unexpected:
        problems.append(f"it has {_some(unexpected)}, which the model lacks")
    if shapes:
        problems.append(f"these have another shape: {_some(shapes)}")
    if problems:
        raise CheckpointMismatchError(
            "the checkpoint belongs to another model: "
            + "; ".join(problems)
            + ". Build the model that it was saved from, or load with strict=False to skip names "
            "that do not match"
        )
    module.load_state_dict(dict(state), strict=strict)


def _names_by_index(optimizer: Optimizer, module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by the index that `Optimizer.state_dict` gives it."""
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=True)}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(1 for p in ordered if id(p) not in names)
    if strangers:
        raise CheckpointMismatchError(
            f"the optimizer holds {strangers} parameter(s) that the model does not have, so its "
            "state cannot be saved by name: build it from model.parameters() of the model that you "
            "hand over"
        )
    return {index: names[id(p)] for index, p in enumerate(ordered)}


def _some(items: list[str], most: int = 5) -> str:
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
