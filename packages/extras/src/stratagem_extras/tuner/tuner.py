"""Tuner: tries short runs of a Trainer to choose the batch size and the learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stratagem.data import UNKNOWN, length_of
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch import rank_zero_info
from stratagem_extras.tuner.batch_size import predicted_size, search
from stratagem_extras.tuner.lr_finder import LRFinder, Sweep
from stratagem_extras.tuner.trial import Trials, check_can_try, trials

if TYPE_CHECKING:
    from stratagem.module import DataModule, Module
    from stratagem.trainer import Trainer

Method = Literal["fit", "validate", "test", "predict"]


class _Job(NamedTuple):
    """What is tried: a run of a model, and what has its batch size under a name."""

    model: Module
    datamodule: DataModule | None
    method: Method
    name: str
    holders: list[Any]


class Tuner:
    """Chooses a batch size and a learning rate by short trials with a Trainer.

    Trials are runs of other Trainers with the same plan and processes, without logs and
    checkpoints.
    Afterwards the model and the RNG states are the same as before, so that a following fit differs
    only by the tuned value. The Trainer shows the loaders of the batch size that was found
    (`trainer.train_dataloader`).

    Args:
        trainer: the Trainer; trials use its strategy, precision and options.

    Example:
        >>> import torch
        >>> from stratagem import Module, Trainer
        >>> from stratagem_extras.tuner import Tuner
        >>> class Line(Module):
        ...     def __init__(self, lr=0.1, batch_size=2):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...         self.lr, self.batch_size = lr, batch_size
        ...     def training_step(self, batch, batch_idx):
        ...         return (self.layer(batch) - 2 * batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
        ...     def train_dataloader(self):
        ...         data = torch.linspace(-1, 1, 64).reshape(-1, 1)
        ...         return torch.utils.data.DataLoader(data, self.batch_size)
        >>> model = Line()
        >>> tuner = Tuner(Trainer(logger=False, enable_checkpointing=False))
        >>> tuner.scale_batch_size(model, mode="power")
        64
        >>> finder = tuner.lr_find(model, max_lr=10.0)
        >>> finder.suggestion() == model.lr
        True
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    # -- the batch size

    def scale_batch_size(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits into memory, set it and return it.

        The search ends at the size of the dataset. On a device with separate memory, trials
        continue from the size that `plan_memory` predicts. A size does not fit if the accelerator
        classifies an error as out of memory; other errors are raised. A `fast_dev_run` makes no
        trials.

        Args:
            model: its loaders use its `batch_size`, or the `batch_size` in its `hparams`.
            train_dataloaders, val_dataloaders, dataloaders: unsupported: an existing loader has a
                fixed size.
            datamodule: replaces the model's loaders; it may have the `batch_size`.
            method: the run of a trial.
            mode: "power": double until a size does not fit; "binsearch": then bisect.
            steps_per_trial: the number of optimizer steps, or batches, of a trial.
            init_val: the first size.
            max_trials: the largest number of trials.
            batch_arg_name: name of the attribute.
            margin: the fraction by which "binsearch" reduces the size after an out-of-memory error.
            max_val: the largest size to try.

        Raises:
            ConfigurationError: an argument is out of its range; loaders were passed; no object has
                the attribute; the run has several ranks, or a single sample does not fit.
            UserCodeError: the loaders do not use the attribute.
        """
        loaders = (train_dataloaders, val_dataloaders, dataloaders)
        holders = self._check_batch_size(model, datamodule, loaders, mode, method, batch_arg_name)
        _check_number("scale_batch_size: steps_per_trial", steps_per_trial)
        _check_number("scale_batch_size: init_val", init_val)
        job = _Job(model, datamodule, method, batch_arg_name, holders)
        limits = {"start": init_val, "trials": max_trials, "margin": margin, "most": max_val}
        return self._scale(job, steps_per_trial, {"mode": mode, **limits})

    def _scale(self, job: _Job, steps: int, limits: dict[str, Any]) -> int | None:
        if self._trainer.options.fast_dev_run:
            warnings.warn(
                "Skipping batch size scaler since `fast_dev_run` is enabled.", stacklevel=3
            )
            return None
        before = [_get(holder, job.name) for holder in job.holders]
        found = None
        sizes: dict[int, Any] = {}
        loader: Any = None
        changes = _changes_for(job.method, steps)
        try:
            with trials(self._trainer, job.model, [job.datamodule], **changes) as tried:

                def fits(size: int) -> int | None:
                    nonlocal loader
                    if sizes:
                        _print(
                            self._trainer, f"batch size {max(sizes)} fits, trying batch size {size}"
                        )
                    self._set_size(job, size)
                    loader = self._try(job, tried)
                    if loader is None:
                        return None
                    sizes[size] = getattr(loader, "batch_size", None)
                    self._check_is_used(sizes, job.name)
                    samples = length_of(getattr(loader, "dataset", None))
                    return size if samples == UNKNOWN else min(size, int(samples))

                def predict(size: int) -> int:
                    known = job.method == "fit" and self._trainer.world_size == 1
                    return predicted_size(self._trainer, job.model, loader, size) if known else 0

                found = search(fits, predict=predict, **limits)
                # Within another run the Trainer shows that run's own loaders.
                if sizes and found is not None and self._trainer.state.status != "running":
                    self._set_size(job, found)
                    self._trainer.open_data(job.method, job.model, datamodule=job.datamodule)
        finally:
            for holder, value in zip(job.holders, before, strict=True):
                _set(holder, job.name, value if found is None else found)
        if found is None:
            raise ConfigurationError(
                "scale_batch_size: not even a batch of one sample fits into memory: use a smaller "
                "model, another precision, or a strategy that shards or offloads"
            )
        _print(self._trainer, f"batch size {found} fits")
        return found

    def _set_size(self, job: _Job, size: int) -> None:
        for holder in job.holders:
            _set(holder, job.name, size)

    def _check_batch_size(
        self,
        model: Module,
        datamodule: DataModule | None,
        loaders: tuple[Any, ...],
        mode: str,
        method: str,
        name: str,
    ) -> list[Any]:
        """Return what has the batch size: model, datamodule, or the hyperparameters of either."""
        trainer = self._trainer
        check_can_try(trainer)
        if mode not in ("power", "binsearch") or method not in (
            *("fit", "validate", "test", "predict"),
        ):
            raise ConfigurationError(
                f"scale_batch_size(mode={mode!r}, method={method!r}): expected 'power' or "
                "'binsearch', and 'fit', 'validate', 'test' or 'predict'"
            )
        if any(loader is not None for loader in loaders):
            raise ConfigurationError(
                "scale_batch_size was given loaders, whose batch size is fixed: define "
                f"train_dataloader() in the model or a DataModule, which reads self.{name}"
            )
        check_has_one_rank(trainer)
        if holders := _holders((model, datamodule), name):
            return holders
        raise ConfigurationError(
            f"scale_batch_size: neither {type(model).__name__} nor a DataModule has {name!r}, as "
            f"an attribute or in hparams: let the loaders use self.{name}, or pass batch_arg_name"
        )

    def _try(self, job: _Job, tried: Trials) -> Any:
        """Run once; return the loader that was read, or None: memory ran out."""
        trainer, loader = tried.make_trainer(), None
        try:
            getattr(trainer, job.method)(job.model, datamodule=job.datamodule, **_quiet(job.method))
            loader = trainer.train_dataloader if job.method == "fit" else _first_loader(trainer)
        except Exception as error:
            if not trainer.strategy.accelerator.is_out_of_memory(error):
                raise
        # Here the error is gone, and with it the frames of the trial.
        tried.snapshot.restore()
        del trainer
        # The next trial, and the fit, begin with unfragmented memory: the size that fits depends on
        # that.
        tried.free_memory()
        return loader

    def _check_is_used(self, sizes: Mapping[int, Any], name: str) -> None:
        of_loader = set(sizes.values())
        if len(sizes) > 1 and len(of_loader) == 1 and None not in of_loader:
            raise UserCodeError(
                f"scale_batch_size: {name} was {' and then '.join(map(str, sizes))}, and the "
                f"loader's batches had {of_loader.pop()} samples all the same: let it be made with "
                f"batch_size=self.{name} whenever it is asked for"
            )

    # -- the learning rate

    def lr_find(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Train some steps at growing learning rates, and suggest a learning rate.

        Args:
            model: the model to train.
            train_dataloaders, val_dataloaders, dataloaders, datamodule: as for `Trainer.fit`; only
                training data is read.
            method: "fit"; other runs have no learning rate.
            min_lr, max_lr: the range.
            num_training: the number of steps in the range.
            mode: "exponential": each step multiplies; "linear": each adds.
            early_stop_threshold: stop when the smoothed loss exceeds this multiple of the best
                loss; None: never.
            update_attr: set the model's `lr` or `learning_rate`, or the value in `hparams`, to the
                suggestion.
            attr_name: name of another attribute for the learning rate.

        Returns:
            The finder, with results, suggestion and plot; None for a `fast_dev_run`, which trains
            no step.

        Raises:
            ConfigurationError: an argument is out of its range, the model has several optimizers,
                or `update_attr` finds no attribute.
        """
        check_can_try(self._trainer)
        _check_number("lr_find: num_training", num_training)
        if not 0 < min_lr < max_lr or mode not in ("exponential", "linear") or method != "fit":
            raise ConfigurationError(
                f"lr_find(method={method!r}, min_lr={min_lr!r}, max_lr={max_lr!r}, mode={mode!r}): "
                "expected 'fit', 0 < min_lr < max_lr, and 'exponential' or 'linear'"
            )
        name = self._rate_name(model, attr_name) if update_attr else ""
        finder = LRFinder(mode, min_lr, max_lr, num_training)
        job = _Job(model, datamodule, "fit", name, [])
        return self._sweep(job, train_dataloaders, finder, early_stop_threshold)

    def _sweep(
        self, job: _Job, loaders: Any, finder: LRFinder, threshold: float | None
    ) -> LRFinder | None:
        trainer = self._trainer
        if trainer.options.fast_dev_run:
            warnings.warn(
                "Skipping learning rate finder since `fast_dev_run` is enabled.", stacklevel=3
            )
            return None
        changes = _changes_for("fit", finder.num_training)
        with trials(trainer, job.model, (loaders, job.datamodule), **changes) as tried:
            trial = tried.make_trainer(Sweep(finder, threshold))
            trial.fit(job.model, loaders, datamodule=job.datamodule)
        suggested = finder.suggestion()
        if suggested is None:
            warnings.warn(
                f"lr_find suggests nothing: of {len(finder.results['lr'])} steps too few have a "
                "finite loss",
                stacklevel=3,
            )
        elif job.name:
            for holder in _holders((job.model,), job.name):
                _set(holder, job.name, suggested)
            _print(trainer, f"learning rate {suggested:.3g} suggested, set as {job.name}")
        return finder

    def _rate_name(self, model: Module, name: str) -> str:
        for one in (name,) if name else ("lr", "learning_rate"):
            if _holders((model,), one):
                return one
        wanted = repr(name) if name else "'lr' nor 'learning_rate'"
        raise ConfigurationError(
            f"lr_find(update_attr=True): {type(model).__name__} has no {wanted}, as an attribute "
            "or in hparams: use it in configure_optimizers(), or pass attr_name, or "
            "update_attr=False"
        )


def check_has_one_rank(trainer: Trainer) -> None:
    """Raise if a search for a batch size runs on several ranks.

    Raises:
        ConfigurationError: the Trainer has several ranks.
    """
    if trainer.plan.world_size > 1:
        raise ConfigurationError(
            f"scale_batch_size with {trainer.plan.world_size} ranks: one that runs out of memory "
            "alone would leave the others waiting: tune with devices=1"
        )


def _changes_for(method: Method, steps: int) -> dict[str, Any]:
    """Return the options of a trial of so many steps or batches."""
    if method == "fit":
        return {"max_steps": steps, "limit_val_batches": 0}
    return {f"limit_{what}_batches": steps for what in ("train", "val", "test", "predict")}


def _first_loader(trainer: Trainer) -> Any:
    (loaders,) = trainer.run.evaluation_loaders.values()
    return loaders[0].loader


def _check_number(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(f"{name}={number!r}: expected a whole number of at least 1")


def _print(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        rank_zero_info(f"stratagem: {text}")


def _quiet(method: Method) -> dict[str, Any]:
    if method == "predict":
        return {"return_predictions": False}
    return {} if method == "fit" else {"verbose": False}


def _holders(owners: tuple[Any, ...], name: str) -> list[Any]:
    """Return the objects that have an attribute or an item of a name."""
    found = []
    for owner in owners:
        if owner is None:
            continue
        kept = getattr(owner, "hparams", None)
        found += [one for one in (owner, kept) if one is not None and _has(one, name)]
    return found


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
