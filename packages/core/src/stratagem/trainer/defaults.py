"""The loggers and callbacks of a Trainer: those that it was given, and those that it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.callbacks import Callback, ModelCheckpoint, ProgressBar
from stratagem.errors import ConfigurationError
from stratagem.lite.request import as_list
from stratagem.loggers import CSVLogger, Logger
from stratagem.storage import paths
from stratagem.trainer.checks import check_state_keys


def make_loggers(
    given: Logger | Sequence[Logger] | bool | None, root: paths.Location, *, quick: bool
) -> list[Logger]:
    """Return the loggers.

    Args:
        given: the argument `logger`.
        root: where logs go; not if it is a URL.
        quick: a `fast_dev_run` has none.

    Raises:
        ConfigurationError: one is no Logger.
    """
    if quick or given is False:
        return []
    if given is None or given is True:
        return [CSVLogger(Path.cwd() if paths.is_url(root) else root)]
    loggers = as_list(given)
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise ConfigurationError(
                f"logger={logger!r}: expected a stratagem.loggers.Logger, a list of them, True or "
                "False"
            )
    return loggers


def make_callbacks(given: Mapping[str, Any], *, quick: bool) -> list[Callback]:
    """Return the callbacks, with a ProgressBar and a ModelCheckpoint if they are wanted.

    Args:
        given: the Trainer's arguments `callbacks`, `enable_checkpointing` and
            `enable_progress_bar`.
        quick: a `fast_dev_run` saves no checkpoints.

    Raises:
        ConfigurationError: one is no Callback, or two would share a state.
    """
    callbacks, enable_checkpointing = as_list(given["callbacks"]), given["enable_checkpointing"]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks has {callback!r}; expected instances of stratagem.Callback"
            )
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if saves and not enable_checkpointing:
        raise ConfigurationError(
            "callbacks has a ModelCheckpoint, but enable_checkpointing=False: leave one of them out"
        )
    if enable_checkpointing and not saves:
        callbacks.append(ModelCheckpoint())
    if given["enable_progress_bar"] and not any(
        isinstance(callback, ProgressBar) for callback in callbacks
    ):
        callbacks.insert(0, ProgressBar())
    return merge_callbacks(callbacks, [], quick=quick)


def merge_callbacks(
    callbacks: Sequence[Callback], asked: Sequence[Callback], *, quick: bool
) -> list[Callback]:
    """Return callbacks with those that a Module asks for; one of a type replaces those before.

    Raises:
        ConfigurationError: two would share a state.
    """
    kinds = tuple(type(callback) for callback in asked)
    merged = [callback for callback in callbacks if type(callback) not in kinds] + list(asked)
    if quick:
        merged = [callback for callback in merged if not isinstance(callback, ModelCheckpoint)]
    check_state_keys(merged)
    return merged
