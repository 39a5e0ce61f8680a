"""Trainer: with the defaults that Lightning's has, where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem import callbacks as own
from stratagem import trainer
from stratagem.errors import ConfigurationError
from stratagem.lightning.api.callbacks import RichProgressBar
from stratagem.lightning.api.loops import EvaluationLoop, FitLoop
from stratagem.lightning.api.model_checkpoint import ModelCheckpoint
from stratagem.loggers import CSVLogger


class Trainer(trainer.Trainer):
    """A Trainer that logs as Lightning's does: into `lightning_logs`, every 50 steps.

    Args:
        logger: None or True: a CSVLogger of the folder `lightning_logs`; as in `stratagem.Trainer`
            otherwise.
        log_every_n_steps: None: 50.
        enable_model_summary: None: print the table of layers, but in a quick run.
        model_registry: not here: expected None.
        **options: those of `stratagem.Trainer`.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.

    Example:
        >>> from stratagem.lightning.api.trainer import Trainer
        >>> Trainer(accelerator="cpu").log_every_n_steps
        50
    """

    def __init__(
        self,
        *,
        logger: Any = None,
        log_every_n_steps: int | None = None,
        enable_model_summary: bool | None = None,
        model_registry: str | None = None,
        **options: Any,
    ) -> None:
        if model_registry is not None:
            raise ConfigurationError(
                f"model_registry={model_registry!r} is a service of Lightning's: leave it out"
            )
        plain = not options.get("barebones")
        quick = bool(options.get("fast_dev_run"))
        if plain and not quick and logger in (None, True):
            logger = CSVLogger(options.get("default_root_dir") or Path.cwd(), "lightning_logs")
        if log_every_n_steps is None and plain:
            log_every_n_steps = 50
        if enable_model_summary is None and plain:
            enable_model_summary = not quick
        if plain:
            options["callbacks"] = _with_defaults(options)
        super().__init__(
            logger=logger,
            log_every_n_steps=log_every_n_steps,  # type: ignore[arg-type]
            enable_model_summary=enable_model_summary,  # type: ignore[arg-type]
            **options,
        )

    # -- views of loops

    @property
    def fit_loop(self) -> FitLoop:
        """The limits and the progress of a fit."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The progress of a validation."""
        return EvaluationLoop(self)

    test_loop = predict_loop = validate_loop


def _with_defaults(options: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks, with a ModelCheckpoint and a progress bar of Lightning's classes."""
    given = options.get("callbacks")
    callbacks = [given] if isinstance(given, own.Callback) else list(given or ())
    if _wants(options, "enable_checkpointing", callbacks, own.ModelCheckpoint):
        callbacks.append(ModelCheckpoint())
    if _wants(options, "enable_progress_bar", callbacks, own.ProgressBar):
        callbacks.insert(0, RichProgressBar())
    return callbacks


def _wants(
    options: Mapping[str, Any], argument: str, callbacks: list[Any], kind: type[own.Callback]
) -> bool:
    is_there = any(isinstance(callback, kind) for callback in callbacks)
    return options.get(argument) in (None, True) and not is_there
