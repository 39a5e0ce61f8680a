"""Calls of hooks by their names, which libraries make by Lightning's private `trainer.call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem import callbacks as own
from stratagem.errors import UserCodeError


def call_callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kw: Any
) -> None:
    """Call a hook of every callback of a Trainer.

    Args:
        trainer: the Trainer; it and its model are the hook's first arguments.
        hook_name: the method of the callbacks.
        *args: further arguments of the hook.
        monitoring_callbacks: True: only of EarlyStopping and ModelCheckpoint; False: of all others.
        **kw: further arguments of the hook, by name.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> from stratagem_lightning.pytorch.callbacks import LambdaCallback
        >>> said = LambdaCallback(on_fit_end=lambda trainer, module: print("end"))
        >>> trainer = Trainer(accelerator="cpu", callbacks=said, barebones=True)
        >>> call_callback_hooks(trainer, "on_fit_end")
        end
    """
    for callback in trainer.callbacks:
        monitors = isinstance(callback, (own.EarlyStopping, own.ModelCheckpoint))
        hook = getattr(callback, hook_name)
        if monitoring_callbacks in (None, monitors) and callable(hook):
            hook(trainer, trainer.lightning_module, *args, **kw)


def call_lightning_module_hook(
    trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kw: Any
) -> Any:
    """Call a method of a Trainer's model.

    Args:
        trainer: the Trainer.
        hook_name: the method.
        *args: its arguments.
        pl_module: another model. Default: the model of the Trainer.
        **kw: arguments by name.

    Returns:
        The return value of the method; None if the model has no such method.

    Raises:
        UserCodeError: the Trainer has no model yet.
    """
    module = pl_module or trainer.lightning_module
    return _call(module, "LightningModule", hook_name, *args, **kw)


def call_lightning_datamodule_hook(trainer: Any, hook_name: str, *args: Any, **kw: Any) -> Any:
    """Call a method of a Trainer's DataModule; arguments as for the model.

    Raises:
        UserCodeError: the Trainer has no DataModule.
    """
    return _call(trainer.datamodule, "LightningDataModule", hook_name, *args, **kw)


def _call(owner: Any, kind: str, hook_name: str, *args: Any, **kw: Any) -> Any:
    if owner is None:
        raise UserCodeError(
            f"No `{kind}` is available to call {hook_name!r} on: expected a call within fit, "
            "validate, test or predict that was given one"
        )
    hook = getattr(owner, hook_name, None)
    return hook(*args, **kw) if callable(hook) else None


def call_and_handle_interrupt(
    trainer: Any, trainer_fn: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """Call a function of a Trainer on each of its ranks.

    Args:
        trainer: the Trainer, which launches its processes if necessary.
        trainer_fn: the function.
        *args: its arguments.
        **kw: arguments by name.

    Returns:
        The return value of the function on rank 0.
    """
    return trainer.runtime.launch(trainer_fn, *args, **kw)


def call_callbacks_state_dict(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the states of a Trainer's callbacks that have one, by their keys."""
    states = ((one.state_key, one.state_dict()) for one in trainer.callbacks)
    return {key: state for key, state in states if state}
