"""The hooks of a run: collected once, so that a hook that nobody overrides costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stratagem.callbacks.callback import Callback

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

Hook = Callable[..., Any]

# No hooks: methods and properties that are read in their own places.
_OTHERS = {"state_dict", "load_state_dict", "state_key", "monitors"}
HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _OTHERS)


class Hooks:
    """The hooks of a run: callbacks in their order, then the module, then callbacks that monitor.

    Args:
        trainer, module: handed to every callback.
        callbacks: the run's callbacks.
    """

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        self._early: dict[str, tuple[Hook, ...]] = {}
        self._monitors: dict[str, tuple[Hook, ...]] = {}
        for name in HOOKS:
            early: list[Hook] = []
            late: list[Hook] = []
            for callback in callbacks:
                if _overrides(callback, name, Callback):
                    bound = partial(getattr(callback, name), trainer, module)
                    (late if callback.monitors else early).append(bound)
            own = getattr(module, name, None)
            # Saving and loading call these two with other arguments.
            called_elsewhere = name in ("on_save_checkpoint", "on_load_checkpoint")
            if own is not None and not called_elsewhere and _is_users(module, name):
                early.append(own)
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


def _is_users(module: object, name: str) -> bool:
    """Whether a module's method is the user's, not torch's or ours."""
    for owner in type(module).__mro__:
        if name in vars(owner):
            return not owner.__module__.startswith(("torch.", "stratagem."))
    return name in vars(module)
