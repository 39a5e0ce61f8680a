"""Tuner: Stratagem's, with Lightning's margin and phrases."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch import rank_zero_warn
from stratagem_extras import tuner
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class Tuner(tuner.Tuner):
    """Chooses a batch size and a learning rate; as `stratagem.Tuner`.

    As in Lightning, `scale_batch_size(mode="binsearch")` takes its margin off also if memory never
    ran out, so a run has the same batch size.

    Args:
        trainer: the Trainer; trials use its strategy, precision and options.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> Tuner(Trainer(accelerator="cpu")).__class__.__name__
        'Tuner'
    """

    @in_lightnings_words
    def scale_batch_size(self, *args: Any, **options: Any) -> int | None:
        """Search for the largest batch size; as there.

        Raises:
            ConfigurationError: as there; or a BatchSizeFinder would search again in the run.
        """
        self._refuse_finder(tuner.BatchSizeFinder)
        given = inspect.signature(tuner.Tuner.scale_batch_size).bind(self, *args, **options)
        _check_loaders(given.arguments)
        _warn_of_two_places(given.arguments["model"], given.arguments.get("batch_arg_name"))
        found = super().scale_batch_size(*args, **options)
        given.arguments["model"].trainer = self._trainer  # not the Trainer of the trials
        return found

    @in_lightnings_words
    def lr_find(self, *args: Any, **options: Any) -> Any:
        """Search for a learning rate; as there.

        Raises:
            ConfigurationError: as there; or a LearningRateFinder would search again in the run.
        """
        self._refuse_finder(tuner.LearningRateFinder)
        given = inspect.signature(tuner.Tuner.lr_find).bind(self, *args, **options)
        found = super().lr_find(*args, **options)
        given.arguments["model"].trainer = self._trainer  # not the Trainer of the trials
        return found

    def _scale(self, job: Any, steps: int, limits: dict[str, Any]) -> int | None:
        return super()._scale(job, steps, {**limits, "always_has_margin": True})

    def _check_is_used(self, sizes: Mapping[int, Any], name: str) -> None:
        try:
            super()._check_is_used(sizes, name)
        except UserCodeError as error:
            rank_zero_warn(str(error))

    def _refuse_finder(self, kind: type) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"Trainer is already configured with a `{kind.__name__}` callback, which searches "
                "again when the run begins: use either the Tuner or the callback"
            )


_LOADERS = {"validate": "val", "test": "test", "predict": "predict"}


def _check_loaders(given: Mapping[str, Any]) -> None:
    """Raise for loaders that the run of the trial does not take.

    Raises:
        ConfigurationError: the message names the argument that the run takes.
    """
    method = given.get("method", "fit")
    fits = ("train_dataloaders", "val_dataloaders")
    wrong = ("dataloaders",) if method == "fit" else fits
    found = [name for name in wrong if given.get(name) is not None]
    holder, name = given.get("datamodule") or given["model"], _LOADERS.get(method, "")
    made = getattr(holder, f"{name}_dataloader", None) if name else None
    if made is not None and isinstance(loaders := made(), (list, tuple)) and len(loaders) > 1:
        raise ConfigurationError(
            f"Batch size finder cannot be used with multiple {name} dataloaders, received "
            f"{len(loaders)}: let {name}_dataloader() return one"
        )
    if found:
        instead = (
            "`train_dataloaders` and `val_dataloaders`" if method == "fit" else "`dataloaders`"
        )
        raise ConfigurationError(
            f"scale_batch_size(method={method!r}) does not take {found[0]}: please consider "
            f"setting {instead} instead, or let the model or a DataModule make the loaders"
        )


def _warn_of_two_places(model: Any, name: str | None) -> None:
    """Warn of a batch size that a model and its hyperparameters both have."""
    name = name or "batch_size"
    if hasattr(model, name) and name in getattr(model, "hparams", ()):
        rank_zero_warn(
            f"Field `model.{name}` and `model.hparams.{name}` are mutually exclusive! Both are "
            "set to the size that is found; remove one of them if they mean different things"
        )
