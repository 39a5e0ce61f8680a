"""The callbacks of a Trainer, and the hooks of a run, collected once before its loop."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.callbacks import ModelCheckpoint, ProgressBar
from stratagem.callbacks.callback import Callback
from stratagem.discovery.former import check_former_names
from stratagem.discovery.registry import Candidate, get_registry
from stratagem.errors import ConfigurationError
from stratagem.runtime.runtime import as_list

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer

Hook = Callable[..., Any]

# Methods and properties of Callback that are not hooks.
_OTHERS = {
    "state_dict",
    "load_state_dict",
    "load_remote_state",
    "state_key",
    "runs_after_metrics",
    "log",
    "log_dict",
}
HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _OTHERS)


class Hooks:
    """The hooks of a run, in calling order.

    The order is: callbacks in the order of the Trainer's list, the module, and at last the
    callbacks with `runs_after_metrics`, which read metrics.

    Args:
        trainer, module: the first two arguments of every callback's hooks.
        callbacks: the run's callbacks.
        wrap: a function that wraps a hook for profilers. It takes an action's name and the hook,
            and returns the function to call.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Module,
        callbacks: Sequence[Callback],
        wrap: Callable[[str, Hook], Hook],
    ) -> None:
        self._early: dict[str, tuple[Hook, ...]] = {}
        self._late: dict[str, tuple[Hook, ...]] = {}
        for name in HOOKS:
            early: list[Hook] = []
            late: list[Hook] = []
            for callback in callbacks:
                if _overrides(callback, name, Callback):
                    bound: Hook = partial(getattr(callback, name), trainer, module)
                    bound = wrap(f"[Callback]{callback.state_key}.{name}", bound)
                    (late if callback.runs_after_metrics else early).append(bound)
            own = getattr(module, name, None)
            # Saving and loading call these two with other arguments.
            called_elsewhere = name in ("on_save_checkpoint", "on_load_checkpoint")
            if own is not None and not called_elsewhere and is_users(module, name):
                early.append(wrap(f"[Module]{type(module).__name__}.{name}", own))
            self._early[name] = tuple(early)
            self._late[name] = tuple(late)

    def of(self, name: str) -> tuple[Hook, ...]:
        """Return the functions of a hook, which take its arguments without the first two."""
        return self._early[name] + self._late[name]

    def call(self, name: str, *args: Any) -> None:
        """Call all functions of a hook."""
        for hook in self.of(name):
            hook(*args)

    def call_before_metrics(self, name: str, *args: Any) -> None:
        """Call a hook, except in callbacks that read an epoch's metrics."""
        for hook in self._early[name]:
            hook(*args)

    def call_after_metrics(self, name: str, *args: Any) -> None:
        """Call a hook only in callbacks that read an epoch's metrics."""
        for hook in self._late[name]:
            hook(*args)


def _overrides(callback: object, name: str, base: type) -> bool:
    return getattr(type(callback), name, None) is not getattr(base, name) or name in vars(callback)


def is_users(module: object, name: str) -> bool:
    """Return whether a module's method comes from the user, and not from torch or Stratagem.

    A method that is set to None does not count.
    """
    if name in getattr(module, "__dict__", ()):
        return vars(module)[name] is not None
    for owner in type(module).__mro__:
        if name in vars(owner):
            return not owner.__module__.startswith(("torch.", "stratagem."))
    return False


class Positional(NamedTuple):
    """The least and the largest number of positional arguments of a function."""

    needed: int
    most: int


def positional_parameters(function: Callable[..., Any]) -> Positional:
    """Return the number of positional arguments that a function takes.

    Example:
        >>> positional_parameters(lambda batch, batch_idx, dataloader_idx=0: None)
        Positional(needed=2, most=3)
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    needed = sum(p.default is p.empty for p in positional)
    return Positional(needed, sys.maxsize if takes_any else len(positional))


def find_callbacks(given: Any) -> list[Any]:
    """Return the user's callbacks, and create the callbacks that are given by name.

    Raises:
        UnknownNameError: if no installed distribution provides a callback of that name.
    """
    found = [given] if isinstance(given, str) else as_list(given)
    registry = get_registry()
    return [_make(registry.find("callback", c)) if isinstance(c, str) else c for c in found]


def _make(found: Candidate) -> Callback:
    try:
        made: Callback = found.spec.build()
    except TypeError as error:
        raise ConfigurationError(
            f"callbacks={found.spec.name!r}: {error}. A name takes no arguments: pass an instance, "
            f"as in callbacks={found.spec.class_name}(...)"
        ) from error
    return made


def make_callbacks(
    callbacks: Sequence[Callback], *, checkpointing: bool, progress_bar: bool, model_summary: bool
) -> list[Callback]:
    """Return the user's callbacks together with the requested built-in callbacks.

    Args:
        callbacks: the user's callbacks.
        checkpointing: add a ModelCheckpoint unless the user passed one.
        progress_bar: add a ProgressBar unless the user passed one.
        model_summary: add a ModelSummary unless the user passed one.

    Raises:
        ConfigurationError: if an object is not a Callback or has a former name of one, or if two
            callbacks have the same `state_key`.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks has {callback!r}; expected instances of stratagem.Callback, or names "
                "of installed callbacks"
                + (": call the class" if isinstance(callback, type) else "")
            )
        check_former_names(type(callback))
    made = list(callbacks)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in made)
    if saves and not checkpointing:
        raise ConfigurationError(
            "callbacks has a ModelCheckpoint, but enable_checkpointing=False: leave one of them out"
        )
    if checkpointing and not saves:
        made.append(ModelCheckpoint())
    if progress_bar and not any(isinstance(callback, ProgressBar) for callback in made):
        made.insert(0, ProgressBar())
    if model_summary:
        from stratagem.callbacks import ModelSummary

        if not any(isinstance(callback, ModelSummary) for callback in made):
            made.insert(0, ModelSummary())
    return check_and_order(made)


def merge_callbacks(callbacks: Sequence[Callback], added: Sequence[Callback]) -> list[Callback]:
    """Return the Trainer's callbacks with a Module's, which replace callbacks of the same type.

    Args:
        callbacks: the Trainer's callbacks.
        added: the Module's callbacks.

    Raises:
        ConfigurationError: if two callbacks have the same `state_key`.
    """
    kinds = tuple(type(callback) for callback in added)
    merged = [callback for callback in callbacks if type(callback) not in kinds] + list(added)
    return check_and_order(merged)


def check_and_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with each ModelCheckpoint last, once their state keys are compared.

    A ModelCheckpoint saves the states that the other callbacks have after the same event.

    Raises:
        ConfigurationError: if two states would overwrite one another in a checkpoint.
    """
    # A mock of a Callback has no such attribute on its class.
    own = [
        callback
        for callback in callbacks
        if getattr(type(callback), "state_dict", None) not in (None, Callback.state_dict)
    ]
    keys = [callback.state_key for callback in own]
    twice = [callback for callback in own if keys.count(callback.state_key) > 1]
    if twice:
        raise ConfigurationError(
            f"several {type(twice[0]).__name__} have the state_key {twice[0].state_key!r}: their "
            "states would overwrite one another: give them different arguments or state_keys"
        )
    return sorted(callbacks, key=lambda callback: isinstance(callback, ModelCheckpoint))
