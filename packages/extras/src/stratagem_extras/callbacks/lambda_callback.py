"""LambdaCallback: hooks that are given as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError


class LambdaCallback(Callback):
    """Calls functions at hooks; other hooks cost no time.

    Args:
        **hooks: a function for each hook of `Callback`, by its name, with the hook's arguments
            (trainer and module first); None is ignored.

    Raises:
        ConfigurationError: a name is not a hook, or a value cannot be called.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import LambdaCallback
        >>> said = LambdaCallback(on_train_end=lambda trainer, module: print("done"))
        >>> said in Trainer(callbacks=said, logger=False).callbacks
        True
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = [name for name in vars(Callback) if name.startswith("on_")] + ["setup", "teardown"]
        for name, function in hooks.items():
            if name not in known:
                raise ConfigurationError(
                    f"LambdaCallback({name}=...): there is no such hook; expected one of "
                    f"{', '.join(sorted(known))}"
                )
            if function is None:
                continue
            if not callable(function):
                raise ConfigurationError(
                    f"LambdaCallback({name}={function!r}): expected a function of the hook's "
                    "arguments"
                )
            setattr(self, name, function)
