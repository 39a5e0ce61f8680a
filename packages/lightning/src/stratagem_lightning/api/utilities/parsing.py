"""Attributes that a model, its hyperparameters or its DataModule may have, and namespaces."""

from __future__ import annotations

import inspect
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType
from typing import Any

from stratagem.launch import rank_zero_warn


def is_picklable(obj: object) -> bool:
    """Whether pickle takes an object."""
    try:
        pickle.dumps(obj)
    except Exception:  # whatever an object's own methods raise
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any] | Namespace) -> None:
    """Remove values that cannot be pickled, with a warning for each."""
    held = vars(hparams) if isinstance(hparams, Namespace) else hparams
    for name in [name for name, value in held.items() if not is_picklable(value)]:
        rank_zero_warn(f"hparams[{name!r}] cannot be pickled, and is left out of them")
        del held[name]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the `__init__` that runs in a frame, by name, without `self`."""
    names, _, keywords, values = inspect.getargvalues(frame)
    given = {name: values[name] for name in names[1:] if name in values}
    return {**given, **values.get(keywords or "", {})}


def collect_init_args(
    frame: FrameType, path_args: list[dict[str, Any]], inside: bool = False
) -> list[dict[str, Any]]:
    """Return the arguments of the `__init__` methods that run in a frame and in its callers.

    Args:
        frame: the innermost frame to search.
        path_args: the arguments of the frames inside this frame.
        inside: whether the previous frame ran an `__init__`.

    Returns:
        The arguments of each method by name, the innermost method first.
    """
    outer = frame.f_back
    if outer is None:
        return path_args
    if "__class__" not in frame.f_locals:
        return path_args if inside else collect_init_args(outer, path_args)
    found = get_init_args(frame) if frame.f_code.co_name == "__init__" else {}
    return collect_init_args(outer, [*path_args, *([found] if found else [])], inside=True)


def _holders(model: Any, name: str) -> list[Any]:
    """Return what has an attribute: the model, its hyperparameters, its trainer's DataModule."""
    trainer = vars(model).get("_trainer")
    holders = []
    for owner in (model, None if trainer is None else trainer.datamodule):
        for holder in (owner, getattr(owner, "hparams", None)):
            has_name = name in holder if isinstance(holder, Mapping) else hasattr(holder, name)
            if has_name:
                holders.append(holder)
    return holders


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Whether a model, its hyperparameters or its DataModule has an attribute."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute of a model's DataModule, its hyperparameters or its own.

    Raises:
        AttributeError: no holder has the attribute.
    """
    holder = _required(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute in every place that has it.

    Raises:
        AttributeError: no holder has the attribute.
    """
    for holder in _required(model, attribute):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _required(model: Any, name: str) -> list[Any]:
    if holders := _holders(model, name):
        return holders
    raise AttributeError(
        f"{name!r} is neither stored in the model namespace nor the `hparams` namespace/dict, nor "
        f"the datamodule. The model is a {type(model).__name__}"
    )


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of an `__init__`'s self, `*args` and `**kwargs`; None where it has none.

    Example:
        >>> class Net:
        ...     def __init__(self, width, *sizes): ...
        >>> parse_class_init_keys(Net)
        ('self', 'sizes', None)
    """
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    names = {parameter.kind: parameter.name for parameter in parameters}
    kinds = inspect.Parameter
    return parameters[0].name, names.get(kinds.VAR_POSITIONAL), names.get(kinds.VAR_KEYWORD)


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Whether a hook takes an argument.

    Args:
        hook_fx: the hook.
        param: the argument's name.
        explicit: only by this name; False: also where it takes any, by `*args`.
        min_args: also where it takes as many arguments as this.

    Example:
        >>> def training_step(batch, *more): ...
        >>> [is_param_in_hook_signature(training_step, "batch_idx", each) for each in (True, False)]
        [False, True]
    """
    parameters = inspect.signature(hook_fx).parameters
    if param in parameters:
        return True
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    enough = min_args is not None and len(parameters) >= min_args
    return enough or (takes_any and not explicit)
