"""Trainer: with the defaults that Lightning's has, where they differ."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from stratagem import callbacks as own, storage, trainer
from stratagem.checkpoint import find_all
from stratagem.data import CombinedLoader
from stratagem.errors import ConfigurationError, MissingPackageError
from stratagem.launch import rank_zero_info, rank_zero_warn
from stratagem.loggers import Logger
from stratagem.profilers import Profiler
from stratagem.trainer import LatestValues, root_folder
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.rich_bar import RichProgressBar
from stratagem_lightning.api.core import dataloader_iter
from stratagem_lightning.api.core.loops import EvaluationLoop, FitLoop, PredictionLoop
from stratagem_lightning.api.core.states import TrainerState
from stratagem_lightning.api.loggers import CSVLogger, DummyLogger, TensorBoardLogger

if TYPE_CHECKING:
    from stratagem.strategies import PreparedModel
    from stratagem.trainer import BatchFeed, Run, Step

_OWN_DEFAULTS = ("logger", "log_every_n_steps", "enable_model_summary")
"""Arguments whose defaults are Lightning's where None is given."""


def _taking_arguments_of(base: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show the signature of whom the arguments are handed on to, for command lines."""
    taken = inspect.signature(base.__init__)  # type: ignore[misc]
    # Not as text, which only its own module can evaluate.
    types = get_type_hints(base.__init__, localns={"Profiler": Profiler})  # type: ignore[misc]
    parameters = [
        one.replace(
            annotation=types.get(name, one.annotation),
            default=None if name in _OWN_DEFAULTS else one.default,
        )
        for name, one in taken.parameters.items()
    ]

    def show(init: Callable[..., None]) -> Callable[..., None]:
        init.__signature__ = taken.replace(parameters=parameters)  # type: ignore[attr-defined]
        init.__annotations__ = types
        return init

    return show


class Trainer(trainer.Trainer):
    """A Trainer that logs as Lightning's does: into `lightning_logs`, every 50 steps.

    Args:
        logger: None or True: a TensorBoardLogger of the folder `lightning_logs`, or a CSVLogger of
            it where TensorBoard is not installed; as in `stratagem.Trainer` otherwise.
        log_every_n_steps: None: 50.
        enable_model_summary: None: print the table of layers, but in a quick run.
        model_registry: not here: expected None.
        **options: those of `stratagem.Trainer`.

    What is not given is read from the environment, from PL_TRAINER_MAX_STEPS for `max_steps`.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.

    Example:
        >>> from stratagem_lightning.api.trainer import Trainer
        >>> Trainer(accelerator="cpu").log_every_n_steps
        50
    """

    @_taking_arguments_of(trainer.Trainer)
    def __init__(self, **options: Any) -> None:
        given = {n: v for n, v in options.items() if v is not None or n not in _OWN_DEFAULTS}
        options = {**_of_environment(), **given}
        logger, log_every_n_steps, enable_model_summary = (
            options.pop(name, None) for name in _OWN_DEFAULTS
        )
        model_registry = options.pop("model_registry", None)
        if model_registry is not None:
            raise ConfigurationError(
                f"model_registry={model_registry!r} is a service of Lightning's: leave it out"
            )
        plain = not options.get("barebones")
        quick = bool(options.get("fast_dev_run"))
        if plain and not quick and logger in (None, True):
            logger = _default_logger(options.get("default_root_dir"))
        if log_every_n_steps is None and plain:
            log_every_n_steps = 50
        if enable_model_summary is None and plain:
            enable_model_summary = not quick
        if plain:
            options["callbacks"] = _with_defaults(options)
        super().__init__(
            logger=logger,
            log_every_n_steps=log_every_n_steps,
            enable_model_summary=enable_model_summary,
            **options,
        )
        if quick and plain and logger not in (False, []):
            self.loggers = [DummyLogger()]

        _say_what_one_means(options)
        if self.fast_dev_run in (0, 1):
            self.fast_dev_run = bool(self.fast_dev_run)

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
            model, train_dataloaders, val_dataloaders, datamodule: as there.
            ckpt_path: as there; "last" begins anew, with a warning, where nothing is saved yet.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
        """
        path = self._last_if_there(ckpt_path, "fit")
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, path)

    def validate(  # type: ignore[override]  # in Lightning's order
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run validation; as `stratagem.Trainer.validate`, but for a model that is not given.

        Args:
            model: None: the one that was fitted, with its best weights where some were saved.
            dataloaders, ckpt_path, verbose, datamodule: as there.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
        """
        path = self._best_if_left_out(model, ckpt_path, "validate")
        return self._logged(super().validate(model, dataloaders, datamodule, path, verbose))

    def test(  # type: ignore[override]  # in Lightning's order
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run testing. Arguments as in `validate`."""
        path = self._best_if_left_out(model, ckpt_path, "test")
        return self._logged(super().test(model, dataloaders, datamodule, path, verbose))

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Predict; as `stratagem.Trainer.predict`, with `model` and `ckpt_path` of `validate`."""
        path = self._best_if_left_out(model, ckpt_path, "predict")
        return super().predict(model, dataloaders, datamodule, return_predictions, path)

    def make_train_step(self, run: Run, prepared: PreparedModel) -> Step:
        """Return the step of a fit; also of one whose `training_step` takes `dataloader_iter`."""
        if dataloader_iter.takes_dataloader_iter(run.module.training_step):
            return dataloader_iter.ReadingStep(run, prepared)
        return super().make_train_step(run, prepared)

    def make_batch_feed(
        self,
        step: Callable[..., Any],
        batches: Iterator[tuple[Any, int, int]],
        count: float,
        takes: int,
    ) -> BatchFeed:
        """Return what passes batches to a step; also to one that takes `dataloader_iter`."""
        if dataloader_iter.takes_dataloader_iter(step):
            return dataloader_iter.IterFeed(dataloader_iter.DataLoaderIter(batches, count))
        return super().make_batch_feed(step, batches, count, takes)

    def _run_on_rank(self, launched: Any, job: Any) -> Any:
        """Run, and forget before another run what was logged in the one before."""
        if job.stage != "fit":
            self._latest = LatestValues()
        return super()._run_on_rank(launched, job)

    def _logged(self, results: list[dict[str, float]]) -> list[dict[str, float]]:
        """Return of the values of each loader those that loggers are given, as Lightning does."""
        names = self._latest.for_loggers
        return [{n: value for n, value in one.items() if n in names} for one in results]

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar."""
        return {name: float(value) for name, value in self._latest.bar.items()}

    def _last_if_there(self, ckpt_path: str | Path | None, what: str) -> str | Path | None:
        """Return what to load, None in the place of "last" as long as nothing is saved."""
        if ckpt_path != "last" or self._has_saved():
            return ckpt_path
        rank_zero_warn(
            f"{what}(ckpt_path='last'): nothing is saved yet in the ModelCheckpoints' folders, so "
            "that no checkpoint is loaded"
        )
        return None

    def _best_if_left_out(
        self, model: Any, ckpt_path: str | Path | None, what: str
    ) -> str | Path | None:
        """Return "best" where neither model nor checkpoint is named, as Lightning has it."""
        ckpt_path = self._last_if_there(ckpt_path, what)
        saved = any(saver.best_model_path for saver in self.checkpoint_callbacks)
        if model is not None or ckpt_path is not None or not saved:
            return ckpt_path
        rank_zero_warn(
            "without a model and a ckpt_path the best weights that fit has saved are taken; pass "
            "the model to take its present ones"
        )
        return "best"

    def _has_saved(self) -> bool:
        """Whether a ModelCheckpoint has something to go on from."""
        savers = self.checkpoint_callbacks
        alone = self.default_root_dir if not self.loggers else None
        folders = [
            saver.dirpath or (None if alone is None else storage.join(alone, "checkpoints"))
            for saver in savers
        ]
        there = list(find_all(folder for folder in folders if folder is not None))
        return bool(there) or any(saver.kept_paths for saver in savers)

    # -- views of its parts, its state and of loops

    @property
    def default_root_dir(self) -> str:
        """Where logs and checkpoints go, as text, which scripts add to."""
        return str(vars(self)["default_root_dir"])

    @default_root_dir.setter
    def default_root_dir(self, folder: str | Path | None) -> None:
        vars(self)["default_root_dir"] = root_folder(folder)

    @property
    def train_dataloader(self) -> Any:
        """This rank's loader for training; of several, the list or dict of them."""
        loader = super().train_dataloader
        return loader.iterables if isinstance(loader, CombinedLoader) else loader

    @property
    def precision_plugin(self) -> Any:
        """The precision."""
        return self.strategy.precision

    @property
    def state(self) -> TrainerState:  # type: ignore[override]  # the same in Lightning's enumerations
        """What it is doing."""
        return TrainerState(self)

    @property
    def fit_loop(self) -> FitLoop:
        """The limits and the progress of a fit."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The progress of a validation."""
        return EvaluationLoop(self)

    test_loop = validate_loop

    @property
    def predict_loop(self) -> PredictionLoop:
        """The progress of predicting, and what it has returned."""
        return PredictionLoop(self)


def _default_logger(root: str | Path | None) -> Logger:
    """Return what Lightning logs by where nothing else is asked for.

    Args:
        root: `default_root_dir`; not if it is a URL.
    """
    folder = Path.cwd() if root is None or storage.is_url(root) else root
    try:
        return TensorBoardLogger(folder)
    except MissingPackageError:
        return CSVLogger(folder)


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


def _say_what_one_means(options: Mapping[str, Any]) -> None:
    """Say whether it is one batch or all of them, where 1 and 1.0 are easily mistaken."""
    for name in (*(f"limit_{what}_batches" for what in _LIMITED), "overfit_batches"):
        given = options.get(name)
        if given != 1 or isinstance(given, bool):
            continue
        means = "1 batch of an epoch is" if isinstance(given, int) else "100% of the batches are"
        other = "1.0 takes all of them" if isinstance(given, int) else "1 takes a single one"
        rank_zero_info(f"{name}={given}: {means} taken; {other}")


_LIMITED = ("train", "val", "test", "predict")
_PREFIX = "PL_TRAINER_"


def _of_environment() -> dict[str, Any]:
    """Return the arguments that environment variables give, as Python reads them."""
    found: dict[str, Any] = {}
    for name, text in os.environ.items():
        if not name.startswith(_PREFIX):
            continue
        try:
            found[name.removeprefix(_PREFIX).lower()] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name.removeprefix(_PREFIX).lower()] = text
    return found
