"""Overridden methods that Lightning refuses, or calls where Stratagem does not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from stratagem.errors import UserCodeError
from stratagem.trainer import is_users
from stratagem_lightning.api.instance_check import Shown

# Strategies with Lightning's methods.
from stratagem_lightning.api.strategies import called as called
from stratagem_lightning.api.utilities.exceptions import UserRuntimeError, UserTypeError

if TYPE_CHECKING:
    from stratagem.module import Module

_STEPS = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}


def refuse_uncalled_overrides(objects: Iterable[object]) -> None:
    """Raise for objects with classes that override a method which only Lightning calls.

    Without this check, the work of such a method would be skipped silently.

    Args:
        objects: callbacks, loggers, a model and so on.

    Raises:
        UserCodeError: the message names the class and its methods.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import ModelCheckpoint
        >>> class Mine(ModelCheckpoint):
        ...     __module__ = "mine"
        ...
        ...     def check_monitor_top_k(self, trainer, current=None):
        ...         return True
        >>> refuse_uncalled_overrides([Mine()])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        stratagem.errors.UserCodeError: Mine overrides check_monitor_top_k of ModelCheckpoint...
    """
    for each in objects:
        bases = type(each).__mro__
        for number, base in enumerate(bases):
            uncalled = _uncalled().get(base.__name__, frozenset())
            if not uncalled or not _is_ours(base):
                continue
            users = [kind for kind in bases[:number] if not _is_ours(kind)]
            found = sorted({name for kind in users for name in vars(kind) if name in uncalled})
            # A class of ours between the two may have it.
            found = [name for name in found if not is_called(base, name)]
            if found:
                advice = next((_ADVICE[name] for name in found if name in _ADVICE), _USUALLY)
                raise UserCodeError(
                    f"{type(each).__name__} overrides {', '.join(found)} of {base.__name__}, which "
                    "Lightning calls and Stratagem does not: the run would differ silently. "
                    + advice
                )


def check_dataloader_idx(module: Module, what: str, loaders: int) -> None:
    """Check that a module's step and hooks take `dataloader_idx` with several loaders.

    Args:
        module: the model.
        what: "validation", "test" or "predict".
        loaders: the number of loaders.

    Raises:
        UserRuntimeError: a method does not take it, or requires it although the run has a single
            loader.
        UserTypeError: a method requires an argument under another name.

    Example:
        >>> from stratagem_lightning.pytorch.demos.boring_classes import BoringModel
        >>> check_dataloader_idx(BoringModel(), "validation", 1)
    """
    loader = f"{what.replace('validation', 'val')}_dataloader"
    step = _STEPS[what]
    usual = {step: 2, f"on_{what}_batch_start": 2, f"on_{what}_batch_end": 3}
    for name, arguments in usual.items():
        method = getattr(module, name, None)
        if method is None or not is_users(module, name):
            continue
        parameters = inspect.signature(method).parameters
        takes: Any = parameters.get("dataloader_idx")
        where = f"{type(module).__name__}.{name}()"
        if loaders == 1 and takes is not None and takes.default is takes.empty:
            raise UserRuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in "
                f"`{where}`. Remove the argument, or give it a default: `dataloader_idx=0`"
            )
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [one for one in parameters.values() if one.kind in kinds]
        required = [one.name for one in positional if one.default is one.empty]
        if loaders == 1 and takes is None and len(required) > arguments:
            raise UserTypeError(
                f"{where} missing 1 required positional argument: {required[arguments]!r}. The "
                "index of the loader is passed as `dataloader_idx`: call the argument so"
            )
        takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        reads_itself = name == step and "dataloader_iter" in parameters
        if loaders > 1 and takes is None and not takes_all and not reads_itself:
            raise UserRuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in "
                f"`{where}`, so it cannot tell them apart. Add `dataloader_idx=0` to its signature"
            )


def is_called(kind: type, name: str) -> bool:
    """Whether a class of ours has a method that an override replaces.

    Example:
        >>> is_called(dict, "items"), is_called(dict, "item")
        (True, False)
    """
    if any(name in _ONLY_READ.get(base.__name__, ()) for base in kind.__mro__):
        return False
    return hasattr(kind, name) and not isinstance(inspect.getattr_static(kind, name, None), Shown)


_USUALLY = "Move the code into a hook (such as on_validation_end) or a method that both have"
_OF_BAR = (
    "Override get_metrics to choose the values, or pass theme=RichProgressBarTheme(...) for their "
    "format; for a bar of another form, subclass TQDMProgressBar, whose init_train_tqdm and its "
    "like are called, or ProgressBar, and draw it in on_train_batch_end"
)
_ADVICE = dict.fromkeys(
    ("_init_progress", "configure_columns", "_update_metrics", "_add_task", "_update"), _OF_BAR
)
"""By an overridden method, what to write in its place."""

_ONLY_READ = {
    "Strategy": frozenset(
        (
            *("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision"),
            *("global_rank", "is_global_zero", "local_rank", "node_rank", "world_size"),
            *("model", "optimizers"),
        )
    ),
    "Module": frozenset(("configure_sharded_model", "device_mesh", "on_gpu")),
    "HyperparametersMixin": frozenset(("remove_ignored_hparams",)),
}
"""By the name of a class, what users may read or call of it, and the loop itself does not."""


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0].startswith("stratagem")


@cache
def _uncalled() -> dict[str, frozenset[str]]:
    """Return the methods by the name of the class; scripts/uncalled.py writes the file."""
    text = files(__package__).joinpath("uncalled.txt").read_text(encoding="utf-8")
    rows = (line.split(": ") for line in text.splitlines())
    return {name: frozenset(methods.split()) for name, methods in rows}
