"""Trainer: with the defaults that Lightning's has, where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem import trainer
from stratagem.errors import ConfigurationError
from stratagem.lightning.api.loops import EvaluationLoop, FitLoop
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
        super().__init__(
            logger=logger,
            log_every_n_steps=log_every_n_steps,  # type: ignore[arg-type]
            enable_model_summary=enable_model_summary,  # type: ignore[arg-type]
            **options,
        )

    # -- the four runs

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a model; as `stratagem.Trainer.fit`.

        Args:
            model, train_dataloaders, val_dataloaders, datamodule, ckpt_path: as there.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
        """
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run validation; as `stratagem.Trainer.validate`, in another order of arguments.

        Args:
            model, dataloaders, ckpt_path, verbose, datamodule: as there.
            weights_only: not needed here.
        """
        return super().validate(model, dataloaders, datamodule, ckpt_path, verbose)

    def test(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run testing; as `stratagem.Trainer.test`, in another order of arguments.

        Args:
            model, dataloaders, ckpt_path, verbose, datamodule: as there.
            weights_only: not needed here.
        """
        return super().test(model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Predict; as `stratagem.Trainer.predict`.

        Args:
            model, dataloaders, datamodule, return_predictions, ckpt_path: as there.
            weights_only: not needed here.
        """
        return super().predict(model, dataloaders, datamodule, return_predictions, ckpt_path)

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
