"""The hooks of a run: collected once, so that a hook that nobody overrides costs nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.callbacks.callback import Callback

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer

Hook = Callable[..., Any]

# No hooks: methods and properties that are read in their own places.
_OTHERS = {"state_dict", "load_state_dict", "take_over", "state_key", "monitors", "log", "log_dict"}
HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _OTHERS)


class Hooks:
    """The hooks of a run: callbacks in their order, then the module, then callbacks that monitor.

    Args:
        trainer, module: handed to every callback.
        callbacks: the run's callbacks.
        wrap: returns the function to call for a hook, given its name for profilers and its own.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Module,
        callbacks: Sequence[Callback],
        wrap: Callable[[str, Hook], Hook],
    ) -> None:
        self._early: dict[str, tuple[Hook, ...]] = {}
        self._monitors: dict[str, tuple[Hook, ...]] = {}
        for name in HOOKS:
            early: list[Hook] = []
            late: list[Hook] = []
            for callback in callbacks:
                if _overrides(callback, name, Callback):
                    bound: Hook = partial(getattr(callback, name), trainer, module)
                    bound = wrap(f"[Callback]{callback.state_key}.{name}", bound)
                    (late if callback.monitors else early).append(bound)
            own = getattr(module, name, None)
            # Saving and loading call these two with other arguments.
            called_elsewhere = name in ("on_save_checkpoint", "on_load_checkpoint")
            if own is not None and not called_elsewhere and is_users(module, name):
                early.append(wrap(f"[Module]{type(module).__name__}.{name}", own))
            self._early[name] = tuple(early)
            self._monitors[name] = tuple(late)

    def of(self, name: str) -> tuple[Hook, ...]:
        """Return all functions of a hook; each takes the hook's arguments after the first two."""
        return self._early[name] + self._monitors[name]

    def call(self, name: str, *args: Any) -> None:
        """Call a hook."""
        for hook in self.of(name):
            hook(*args)

    def call_all_but_monitors(self, name: str, *args: Any) -> None:
        """Call a hook of all but those that read an epoch's values."""
        for hook in self._early[name]:
            hook(*args)

    def call_monitors(self, name: str, *args: Any) -> None:
        """Call a hook of those that read an epoch's values."""
        for hook in self._monitors[name]:
            hook(*args)


def _overrides(callback: object, name: str, base: type) -> bool:
    return getattr(type(callback), name, None) is not getattr(base, name) or name in vars(callback)


def is_users(module: object, name: str) -> bool:
    """Whether a module's method is the user's, not torch's or ours; None in its place is none."""
    if name in getattr(module, "__dict__", ()):
        return vars(module)[name] is not None
    for owner in type(module).__mro__:
        if name in vars(owner):
            return not owner.__module__.startswith(("torch.", "stratagem."))
    return False


class Positional(NamedTuple):
    """How many positional arguments a function needs, and takes at most."""

    needed: int
    most: int


def positional_parameters(function: Callable[..., Any]) -> Positional:
    """Return how many positional arguments a function takes.

    Example:
        >>> positional_parameters(lambda batch, batch_idx, dataloader_idx=0: None)
        Positional(needed=2, most=3)
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    needed = sum(p.default is p.empty for p in positional)
    return Positional(needed, sys.maxsize if takes_any else len(positional))
