"""Who is told of an event: collected once, so that an event that nobody overrides costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.callbacks.callback import Callback

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

Hook = Callable[..., Any]

# Not events of a run: they are called by name, in their own places.
_OTHERS = {"state_dict", "load_state_dict", "own_state", "state_key", "monitors"}
HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _OTHERS)


class Hooks:
    """The hooks of a run: callbacks in their order, then the module, then those that monitor.

    Args:
        trainer, module: handed to every callback.
        callbacks: the run's callbacks.
    """

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        self._hooks: dict[str, tuple[Hook, ...]] = {}
        self._monitors: dict[str, tuple[Hook, ...]] = {}
        for event in HOOKS:
            early: list[Hook] = []
            late: list[Hook] = []
            for callback in callbacks:
                if _overrides(callback, event, Callback):
                    bound = _bind(getattr(callback, event), trainer, module)
                    (late if callback.monitors else early).append(bound)
            own = getattr(module, event, None)
            # Saving and loading are called with other arguments, by whoever saves and loads.
            called_elsewhere = event in ("on_save_checkpoint", "on_load_checkpoint")
            if own is not None and not called_elsewhere and _is_users(module, event):
                early.append(own)
            self._hooks[event] = tuple(early)
            self._monitors[event] = tuple(late)

    def of(self, event: str) -> tuple[Hook, ...]:
        """Return all hooks of an event; each takes the event's own arguments."""
        return self._hooks[event] + self._monitors[event]

    def call(self, event: str, *args: Any) -> None:
        """Tell everyone of an event."""
        for hook in self.of(event):
            hook(*args)

    def call_all_but_monitors(self, event: str, *args: Any) -> None:
        """Tell those that do not read an epoch's values."""
        for hook in self._hooks[event]:
            hook(*args)

    def call_monitors(self, event: str, *args: Any) -> None:
        """Tell those that read an epoch's values."""
        for hook in self._monitors[event]:
            hook(*args)


def _overrides(thing: object, name: str, base: type) -> bool:
    return getattr(type(thing), name, None) is not getattr(base, name) or name in vars(thing)


def _is_users(module: object, event: str) -> bool:
    """Whether a module's method is the user's, not torch's or ours."""
    for owner in type(module).__mro__:
        if event in vars(owner):
            return not owner.__module__.startswith(("torch.", "stratagem."))
    return event in vars(module)


def _bind(method: Callable[..., Any], trainer: Trainer, module: Module) -> Hook:
    def hook(*args: Any) -> None:
        method(trainer, module, *args)

    return hook
