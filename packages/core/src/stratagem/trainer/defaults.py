"""The loggers and callbacks of a Trainer: those that it was given, and those that it adds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.callbacks import Callback, ModelCheckpoint, ProgressBar
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.loggers import Logger
from stratagem.loggers.adapted import AdaptedLogger
from stratagem.runtime.request import as_list
from stratagem.storage import paths
from stratagem.trainer.checks import check_state_keys
from stratagem.trainer.options import of_barebones, with_defaults

if TYPE_CHECKING:
    from stratagem.profilers import Profiler

Loggers = Logger | str | Sequence[Logger | str] | bool | None
"""What a Trainer takes as `logger`."""


def make_profiler(given: str | Profiler | None) -> Profiler | None:
    """Return the profiler, or None; profilers are imported only where there is one.

    Raises:
        ConfigurationError: it is none, and no name of one.
    """
    if given is None:
        return None
    from stratagem.profilers.profiler import make_profiler

    return make_profiler(given)


def parse_arguments(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the Trainer's arguments as they are meant, those that are None by their defaults.

    Args:
        arguments: the `locals()` of its `__init__`, before it has any others.
        function: that `__init__`.

    Raises:
        ConfigurationError: two of them contradict one another.
        UnknownNameError: no installed distribution provides a callback of a given name.
    """
    given = with_defaults(of_barebones(arguments, function), function)
    # Here None is a value: batches are counted over epochs.
    given["check_val_every_n_epoch"] = arguments["check_val_every_n_epoch"]
    given["callbacks"] = [_named_callback(each) for each in as_list(given["callbacks"])]
    return _with_schedule(given)


def _with_schedule(given: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments with the schedule of a GradientAccumulationScheduler.

    Raises:
        ConfigurationError: `accumulate_grad_batches` says otherwise.
    """
    schedules = [c.accumulation for c in as_list(given["callbacks"]) if hasattr(c, "accumulation")]
    if not schedules:
        return given
    if given["accumulate_grad_batches"] != 1 or len(schedules) > 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={given['accumulate_grad_batches']!r} beside "
            f"{len(schedules)} GradientAccumulationScheduler: expected one of them"
        )
    return {**given, "accumulate_grad_batches": schedules[0]}


def make_loggers(given: Loggers, root: paths.Location, *, quick: bool) -> list[Logger]:
    """Return the loggers.

    Args:
        given: the argument `logger`.
        root: where logs go; not if it is a URL.
        quick: a `fast_dev_run` has none.

    Raises:
        ConfigurationError: one is no Logger, no name of one, and has no `log_metrics`.
    """
    if quick or given is False:
        return []
    folder = Path.cwd() if paths.is_url(root) else Path(root)
    if given is None or given is True:
        given = "csv"
    return [_make_logger(logger, folder) for logger in as_list(given)]


def _make_logger(given: Any, folder: Path) -> Logger:
    """Return a logger, made by its name where one was given: in the Trainer's folder."""
    made = given
    if isinstance(given, str):
        candidate = get_registry().find("logger", given)
        target = candidate.spec.load()
        takes_folder = "save_dir" in inspect.signature(target).parameters
        made = candidate.spec.build(**({"save_dir": folder} if takes_folder else {}))
    if isinstance(made, Logger):
        return made
    if not callable(getattr(made, "log_metrics", None)) or isinstance(made, type):
        raise ConfigurationError(
            f"logger={made!r}: expected a stratagem.loggers.Logger, the name of one, an object "
            "with log_metrics(metrics, step), a list of them, True or False"
        )
    return AdaptedLogger(made)


def _named_callback(given: Any) -> Any:
    """Return a callback, made by its name if `given` is one."""
    return get_registry().find("callback", given).spec.build() if isinstance(given, str) else given


def make_callbacks(given: Mapping[str, Any], *, quick: bool) -> list[Callback]:
    """Return the callbacks, with a ProgressBar, a ModelSummary and a ModelCheckpoint if wanted.

    Args:
        given: the Trainer's arguments `callbacks`, `enable_checkpointing`,
            `enable_progress_bar` and `enable_model_summary`.
        quick: a `fast_dev_run` saves no checkpoints.

    Raises:
        ConfigurationError: one is no Callback, or two would share a state.
    """
    callbacks, enable_checkpointing = as_list(given["callbacks"]), given["enable_checkpointing"]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks has {callback!r}; expected instances of stratagem.Callback, or names "
                "of installed callbacks"
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
    if given["enable_model_summary"]:
        from stratagem.callbacks import ModelSummary

        if not any(isinstance(callback, ModelSummary) for callback in callbacks):
            callbacks.insert(0, ModelSummary())
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
