"""The state dict of weights and optimizers, by parameter name: what any strategy can load.

The format is the one of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}, ...]}`. It is made
here since that function takes 0.7 s to import and, before the first step, changes training: it runs
a hidden step to initialize the state.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.checkpoint.forms import require_form
from stratagem.errors import (
    CheckpointMismatchError,
    format_names,
    format_text,
    format_value,
    with_explanation,
)
from stratagem.state.safe_data import check_safe_data
from stratagem.state.shards import LazyTensor, read_whole
from stratagem.state.state_checks import (
    OPTIMIZER_FORM,
    as_mismatch,
    check_kinds,
    check_optimizer_state,
)

_WRAPPER = "_orig_mod."
"""What torch.compile(module) puts before the names of a module; models here have none of it."""
_OTHER = "other_state"
"""The entry for the state of an optimizer that belongs to none of its parameters."""
# Group options that some versions or implementations of an optimizer lack (DeepSpeed's Adam lacks
# some of torch's): if the checkpoint lacks them, the optimizer keeps its own.
_DISPENSABLE = frozenset(
    {
        "amsgrad",
        "bias_correction",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
    }
)


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the optimizer's state dict with parameter names instead of indices.

    "other_state" holds entries that belong to no parameter: entries that the optimizer adds beside
    "state" and "param_groups", and entries of "state" with keys that are not parameters.

    Raises:
        CheckpointMismatchError: the optimizer holds a parameter that the module does not.
        CheckpointContentError: an entry of no parameter is not weights-only-safe data.
    """
    state = _by_names(optimizer.state_dict(), _names_by_index(optimizer, module))
    check_safe_data(state.get(_OTHER), f"the state of the optimizer {type(optimizer).__name__}")
    return state


def load_named_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state from `named_state`; parameter groups are matched by parameter names.

    Raises:
        CheckpointMismatchError: the groups hold other parameters, lack options that this optimizer
            needs, or a value has another kind, shape or dtype; the message names the difference.
    """
    names = _names_by_index(optimizer, module)
    groups = optimizer.state_dict()["param_groups"]
    state = optimizer_state_without_wrapper(state)
    own = [[names[index] for index in group["params"]] for group in groups]
    matched = [
        _merged(optimizer, group, saved)
        for group, saved in zip(groups, matching_groups(own, state["param_groups"]), strict=True)
    ]
    check_optimizer_state(optimizer, dict(module.named_parameters()), state)
    saved = state["state"]
    entries = {index: saved[name] for index, name in names.items() if name in saved}
    with as_mismatch(type(optimizer).__name__):
        other = read_whole(state.get(_OTHER, {}))
        others = {key: entry for key, entry in other.get("state", {}).items() if key not in names}
        optimizer.load_state_dict({**other, "state": others | entries, "param_groups": matched})


def per_parameter_state(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state for a strategy that divides it by parameters.

    The names are without the prefixes that `torch.compile(module)` adds.

    Args:
        optimizer: the optimizer, for the error.
        state: its state (see `named_state`).

    Raises:
        CheckpointMismatchError: the state has entries of no parameter, or is no optimizer's state.

    Example:
        >>> import torch
        >>> from stratagem.state import named_state, per_parameter_state
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> per_parameter_state(optimizer, named_state(optimizer, model))["state"]
        {}
    """
    state = optimizer_state_without_wrapper(state)
    if other := state.get(_OTHER):
        names = [*(key for key in other if key != "state"), *other.get("state", ())]
        raise CheckpointMismatchError(
            f"the optimizer {type(optimizer).__name__} has the state {format_names(names)}, which "
            "belongs to no parameter, and this strategy divides optimizer state by parameters: use "
            "strategy='ddp' or 'single_device', keep it in param_groups or in the state of a "
            "parameter, or save the weights alone"
        )
    return state


def with_names(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> Any:
    """Return an optimizer's state by parameter names, if it has numbers, as torch saves it.

    Numbers count the parameters in the order of the groups, which has to be this optimizer's.

    Raises:
        CheckpointMismatchError: its groups have other sizes, or lack a parameter that has state.
    """
    require_form(state, OPTIMIZER_FORM, "the state of an optimizer")
    saved = [list(group["params"]) for group in state["param_groups"]]
    if not any(isinstance(each, int) for group in saved for each in group):
        return optimizer_state_without_wrapper(state)
    names = _names_by_index(optimizer, module)
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own != [len(group) for group in saved]:
        message = (
            f"the checkpoint's optimizer has parameter groups of {list(map(len, saved))} "
            f"parameters, which have no names in it, and this one has {own}: use the optimizer and "
            "the parameter groups that it was saved with"
        )
        raise CheckpointMismatchError(with_explanation(message, "checkpoint-mismatch"))
    numbers = [number for group in saved for number in group]
    by_number = {number: names[index] for index, number in enumerate(numbers)}
    _require_none([k for k in state["state"] if k not in by_number and type(k) is not str])
    return _by_names(state, by_number)


def _by_names(state: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return a state dict of torch as `named_state` does, by the name of each number in it."""
    entries: Mapping[Any, Any] = state["state"]
    other = {key: value for key, value in state.items() if key not in OPTIMIZER_FORM}
    if others := {key: entry for key, entry in entries.items() if key not in names}:
        other["state"] = others
    return {
        "state": {names[key]: entry for key, entry in entries.items() if key in names},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
        **({_OTHER: other} if other else {}),
    }


def _merged(
    optimizer: Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter group with the saved options, or its own where none was saved."""
    # An option that is not among the defaults was added by a scheduler or a user.
    missing = (own.keys() & optimizer.defaults.keys()) - saved.keys() - _DISPENSABLE
    if missing:
        there, here = (sorted(group.keys() - {"params"}) for group in (saved, own))
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has the group options {format_names(there, 50)}, and "
            f"lacks {', '.join(sorted(missing))}: {type(optimizer).__name__} has "
            f"{', '.join(here)}. Use the optimizer that it was saved with"
        )
    check_kinds(own, saved, "the group option")
    return {**own, **saved, "params": own["params"]}


def matching_groups(
    own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved parameter group of each own group, matched by parameter names.

    Each saved group has to be there too: schedulers keep a value for each group in their order, so
    that with one left out others would be trained with its learning rate. For the same reason
    another order is said.

    Raises:
        CheckpointMismatchError: the groups hold other parameters, or some are missing; the message
            names them.
    """
    found = []
    for names in own:
        for group in saved:
            if sorted(group["params"]) == sorted(names):
                found.append(group)
                break
        else:
            there = [format_names(group["params"]) for group in saved]
            message = (
                f"the checkpoint's optimizer has no parameter group of {format_names(names)}; its "
                f"groups are {'; '.join(there) or 'none'}: use the optimizer and the parameter "
                "groups that it was saved with"
            )
            raise CheckpointMismatchError(with_explanation(message, "checkpoint-mismatch"))
    used = {id(group) for group in found}
    if left_out := [
        group["params"] for group in saved if group["params"] and id(group) not in used
    ]:
        message = (
            "the checkpoint's optimizer has parameter groups that this one lacks: "
            f"{'; '.join(map(format_names, left_out))}. Their state would be lost: use the groups "
            "that it was saved with (requires_grad_(False) lets one stay and not train), or load "
            "the weights alone and begin with a new optimizer"
        )
        raise CheckpointMismatchError(with_explanation(message, "checkpoint-mismatch"))
    places = [
        next(i for i, group in enumerate(saved) if group is one) for one in found if one["params"]
    ]
    if places != sorted(places):
        warnings.warn(
            "the optimizer's parameter groups stand in another order than in the checkpoint. Their "
            "own state follows their names, but a scheduler's learning rates follow the order: "
            "with a scheduler, keep the order that it was saved with",
            stacklevel=2,
        )
    return found


def state_without_wrapper(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return state by the names that it has without `torch.compile(module)` around modules.

    Example:
        >>> from stratagem.state import state_without_wrapper
        >>> state_without_wrapper({"net._orig_mod.weight": 1})
        {'net.weight': 1}
    """
    require_form(state, {str: object}, "the state by names")
    return {name.replace(_WRAPPER, ""): value for name, value in state.items()}


def _require_none(unknown: Collection[Any]) -> None:
    """Raise if an optimizer's state has entries of parameters that none of its groups lists."""
    if unknown:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has state of the parameters {format_names(unknown)}, "
            "which are in none of its groups: use the optimizer that it was saved with"
        )


def optimizer_state_without_wrapper(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state (see `named_state`) by such names.

    Raises:
        CheckpointMismatchError: the value is not an optimizer state, or has state of parameters
            that no group has.
    """
    require_form(state, OPTIMIZER_FORM, "the state of an optimizer")
    groups = state["param_groups"]
    names = {name for group in groups for name in group["params"]}
    _require_none(state["state"].keys() - names)
    if not any(_WRAPPER in name for name in names):
        return state
    return {
        **state,
        "state": state_without_wrapper(state["state"]),
        "param_groups": [
            {**group, "params": [name.replace(_WRAPPER, "") for name in group["params"]]}
            for group in groups
        ],
    }


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load weights by name, once names and shapes are checked.

    Args:
        module: receives them.
        state: tensors by name.
        strict: raise for missing and unexpected names; shapes are checked in any case.

    Raises:
        CheckpointMismatchError: lists missing and unexpected names and differing shapes.
    """
    own, state = module.state_dict(), state_without_wrapper(state)
    shapes = {n: tuple(value.shape) for n, value in own.items() if isinstance(value, Tensor)}
    check_weights(own, shapes, state, strict=strict)
    module.load_state_dict(dict(state), strict=strict)


def check_weights(
    own: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    """Check the names and shapes of weights against a model's names and shapes.

    Args:
        own: the names in the state of the model.
        shapes: the shapes of the names that are tensors.
        state: tensors by name.
        strict: raise for missing and unexpected names; shapes are checked in any case.

    Raises:
        CheckpointMismatchError: lists missing and unexpected names and differing shapes.
    """
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    differing = [
        f"{format_text(name, 100)} {found} (the model has {shape})"
        for name, shape in shapes.items()
        if name in state and (found := _shape_of(state[name])) != shape
    ]
    problems = []
    if strict and missing:
        problems.append(f"it lacks {format_names(missing)}")
    if strict and unexpected:
        problems.append(f"it has {format_names(unexpected)}, which the model lacks")
    if differing:
        problems.append(f"these have another shape: {format_names(differing)}")
    if problems:
        advice = "Build the model that it was saved from"
        if not differing:
            advice += ", or skip names: strict=False, or strict_loading = False in a Module"
        message = f"the checkpoint belongs to another model: {'; '.join(problems)}. {advice}"
        raise CheckpointMismatchError(
            with_explanation(message, "checkpoint-mismatch"),
            missing if strict else (),
            unexpected if strict else (),
        )


def _shape_of(value: Any) -> Any:
    """Return the shape of a tensor; for anything else, a text that shows it."""
    return tuple(value.shape) if isinstance(value, (Tensor, LazyTensor)) else format_value(value)


def _names_by_index(optimizer: Optimizer, module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by the index that `Optimizer.state_dict` gives it."""
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=True)}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := sum(id(p) not in names for p in ordered):
        raise CheckpointMismatchError(
            f"the optimizer holds {unknown} parameter(s) that the model does not have, so its "
            "state cannot be saved by name: build it from model.parameters() of the model that you "
            "hand over"
        )
    return {index: names[id(p)] for index, p in enumerate(ordered)}
