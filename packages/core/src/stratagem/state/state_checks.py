"""Comparison of the states of optimizers and schedulers with the objects that will load them.

`load_state_dict` of torch takes any value, so a wrong one would fail in the first step, with an
error that names no parameter, or would change the training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.checkpoint.forms import find_mismatch
from stratagem.errors import CheckpointMismatchError, StratagemError, format_text, format_value
from stratagem.state.shards import LazyTensor

OPTIMIZER_FORM = {
    "state": dict,
    "param_groups": [{"params": [(str, int)]}],
    "other_state?": {"state?": dict},
}
"""The form of an optimizer's state: entries by parameter, groups of parameters, and the rest."""
_ADVICE = "Use what it was saved with, or load the weights alone and begin anew"
_NUMBER, _TENSOR = "a number", "a tensor of floats"
_ADAM = ("step", "exp_avg exp_avg_sq max_exp_avg_sq")
_LBFGS = "d t old_dirs old_stps ro al H_diag prev_flat_grad prev_loss"
# State of torch's own optimizers for a parameter: numbers, tensors of its shape, and other values.
_ENTRIES = {
    "ASGD": ("step eta mu", "ax"),
    "Adadelta": ("step", "square_avg acc_delta"),
    "Adafactor": ("step", "", "row_var col_var variance"),
    "Adagrad": ("step", "sum"),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": ("step", "exp_avg exp_inf"),
    "LBFGS": ("func_evals n_iter", "", _LBFGS),
    "Muon": ("", "momentum_buffer"),
    "NAdam": ("step mu_product", "exp_avg exp_avg_sq"),
    "RAdam": ("step", "exp_avg exp_avg_sq"),
    "RMSprop": ("step", "square_avg momentum_buffer grad_avg"),
    "Rprop": ("step", "prev step_size"),
    "SGD": ("", "momentum_buffer"),
    "SparseAdam": ("step", "exp_avg exp_avg_sq"),
}
# Of these only the ones that a group option asks for.
_OPTIONS = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}


def check_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Check the saved entries of parameters against the optimizer's expected entries.

    Entries of optimizers that are not torch's own only have to be dicts. Group options are not
    compared: schedulers and users add some, and each version of torch has others.

    Args:
        optimizer: will load them.
        parameters: of the model, by name.
        state: an optimizer's state by such names; others are passed over.

    Raises:
        CheckpointMismatchError: names the parameter and the entry.

    Example:
        >>> import torch
        >>> from stratagem.state import check_optimizer_state, named_state
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> parameters = dict(model.named_parameters())
        >>> check_optimizer_state(optimizer, parameters, named_state(optimizer, model))
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    kind = type(optimizer).__name__
    numbers, tensors, *others = _ENTRIES.get(kind, ("", "")) if is_torchs else ("", "")
    known = set(" ".join((numbers, tensors, *others)).split())
    options = {name: group for group in state["param_groups"] for name in group["params"]}
    for name, entry in state["state"].items():
        if name not in parameters:
            continue
        if not isinstance(entry, Mapping) or not all(type(key) is str for key in entry):
            raise _mismatch(entry, f"the state of {name}", "a dict by names")
        if known and (unknown := sorted(entry.keys() - known)):
            raise _mismatch(entry[unknown[0]], f"{format_value(unknown[0])} of {name}", "nothing")
        shape = tuple(parameters[name].shape)
        for key in f"{numbers} {tensors}".split() if entry else ():
            value: Any = entry.get(key)
            what = f"{key!r} of {name}"
            is_asked = key not in _OPTIONS or options.get(name, {}).get(_OPTIONS[key])
            # SGD and Muon have no state before their first step.
            if value is None and (not is_asked or key == tensors == "momentum_buffer"):
                continue
            if key not in entry:
                raise CheckpointMismatchError(
                    f"the checkpoint's optimizer lacks {what}, which {kind} needs. {_ADVICE}"
                )
            if key in numbers.split():
                if not _is_number(value) or (not isinstance(value, LazyTensor) and value < 0):
                    raise _mismatch(value, what, f"{_NUMBER} from 0 on")
            elif not _is_float_tensor(value):
                raise _mismatch(value, what, _TENSOR)
            elif tuple(value.shape) != shape:
                raise _mismatch(value, what, f"the shape {shape}")


def check_kinds(own: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    """Compare the kinds of saved values with the kinds of the current values; None fits any kind.

    Args:
        own, saved: values by name; only common names are compared.
        what: the description of the values in the error, such as "the group option".

    Raises:
        CheckpointMismatchError: a value has another kind; the message names the value.
    """
    for key in own.keys() & saved.keys() - {"params"}:
        if expected := _expected(own[key], saved[key]):
            raise _mismatch(saved[key], f"{what} {key!r}", expected)


def load_scheduler_state(scheduler: Any, state: Any) -> None:
    """Load the state of a learning rate scheduler, after comparing it with the current state.

    Raises:
        CheckpointMismatchError: a value has another kind, or replaces a method; names it.
    """
    with as_mismatch(type(scheduler).__name__):
        _check_scheduler(scheduler, state)
        scheduler.load_state_dict(dict(state))


def _check_scheduler(scheduler: Any, state: Any) -> None:
    of = f"of the scheduler {type(scheduler).__name__}"
    if not isinstance(state, Mapping):
        raise _mismatch(state, f"the state {of}", "a dict")
    own = scheduler.state_dict()
    is_torchs = type(scheduler).__module__.startswith("torch.optim")
    for key, value in state.items():
        what = f"{format_value(key)} {of}"
        if key not in own:
            if (
                type(key) is not str
                or key == "optimizer"
                or callable(getattr(scheduler, key, None))
            ):
                raise _mismatch(value, what, "nothing")
        elif key == "_schedulers" and isinstance(value, list):
            for inner, saved in zip(getattr(scheduler, key, ()), value, strict=False):
                _check_scheduler(inner, saved)
        elif key == "_schedule_phases" and [*map(_phase, value)] != [*map(_phase, own[key])]:
            raise _mismatch(value, what, "the phases that this scheduler has")
        elif is_torchs and (expected := _expected(own[key], value)):
            raise _mismatch(value, what, expected)


def _phase(phase: Mapping[str, Any]) -> dict[str, Any]:
    """Return a phase of a OneCycleLR with a mark in the place of its end, which may differ."""
    return {**phase, "end_step": _is_number(phase["end_step"])}


@contextmanager
def as_mismatch(target: str) -> Iterator[None]:
    """Turn an error within the context into a CheckpointMismatchError that names the target.

    Args:
        target: the object that loads its state, such as "the callback Timer".
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, StratagemError):
            raise
        raise CheckpointMismatchError(
            f"{format_text(target)} cannot load its state ({type(error).__name__}: "
            f"{format_text(str(error))}). {_ADVICE}"
        ) from error


def _expected(own: Any, saved: Any) -> str:
    """Return what is expected in the place of a saved value; "": it is of the own one's kind."""
    if own is None or isinstance(own, bool):
        return "" if own is None or saved is None or isinstance(saved, bool) else "a bool"
    if _is_number(own):
        return "" if _is_number(saved) else _NUMBER
    if isinstance(own, str):
        return "" if isinstance(saved, str) else "a text"
    if isinstance(own, Counter):
        is_alike = isinstance(saved, Mapping) and all(map(_is_number, (*saved, *saved.values())))
        return "" if is_alike else "a dict of numbers"
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            return "a dict"
        of = (_expected(own[key], saved[key]) for key in own.keys() & saved.keys())
        return next(filter(None, of), "")
    if isinstance(own, (list, tuple)):
        if not isinstance(saved, (list, tuple)):
            return "a list"
        if own and not isinstance(own[0], Mapping):
            if len(own) != len(saved):
                return f"{len(own)} values"
            return next(filter(None, map(_expected, own, saved)), "")
    return ""


def _is_number(value: Any) -> bool:
    if isinstance(value, (Tensor, LazyTensor)):
        return math.prod(value.shape) == 1 and not value.dtype.is_complex
    return not find_mismatch(value, float, "") and not math.isnan(value)


def _is_float_tensor(value: Any) -> bool:
    is_tensor = isinstance(value, (Tensor, LazyTensor))
    return is_tensor and (value.dtype.is_floating_point or value.dtype.is_complex)


def _mismatch(value: Any, what: str, expected: str) -> CheckpointMismatchError:
    found = format_value(value)
    if isinstance(value, (Tensor, LazyTensor)):
        found = f"a tensor of {tuple(value.shape)} and {value.dtype}"
    elif isinstance(value, (list, tuple)):
        found = f"a {type(value).__name__} of {len(value)}"
    return CheckpointMismatchError(
        f"the checkpoint has {found} as {what}, expected {expected}. {_ADVICE}"
    )
