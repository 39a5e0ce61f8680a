"""Tuner: tries short runs of a Trainer to choose the batch size and the learning rate."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stratagem.data import UNKNOWN, length_of
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch import rank_zero_info
from stratagem.trainer import Job, check_whole
from stratagem_extras.tuner.batch_size import search
from stratagem_extras.tuner.lr_finder import LRFinder, Sweep
from stratagem_extras.tuner.trial import check_can_try, trials, with_data

if TYPE_CHECKING:
    from stratagem.module import DataModule, Module
    from stratagem.trainer import Trainer
    from stratagem_extras.tuner.trial import Snapshot

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

    Trials log nothing and save nothing. Afterwards the model, RNG states, the Trainer's options,
    values and position are what they were before, so that a fit that follows is the same as
    without them, but for what was tuned. The Trainer shows the loaders of the batch size that was
    found (`trainer.train_dataloader`).

    Args:
        trainer: whose strategy, precision and options are tried.

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
        """Find the largest batch size that memory has room for, set it and return it.

        It ends at the size of the dataset. A size does not fit where the accelerator says that an
        error is one of memory; any other error is raised. A `fast_dev_run` tries nothing.

        Args:
            model: its `batch_size`, or that in its `hparams`, is what its loaders use.
            train_dataloaders, val_dataloaders, dataloaders: none: one that is made has its size.
            datamodule: in the place of the model's loaders; it may have the `batch_size`.
            method: the run that is tried.
            mode: "power": double until it does not fit; "binsearch": then look between.
            steps_per_trial: optimizer steps, or batches, of a trial.
            init_val: size to begin with.
            max_trials: how many at most.
            batch_arg_name: name of the attribute.
            margin: part that "binsearch" takes off the size that was found, where memory ran out.
            max_val: largest size to try.

        Raises:
            ConfigurationError: an argument is out of its range; loaders were passed; nothing has
                the attribute; there are several ranks, or not even one sample fits.
            UserCodeError: the loaders do not use it.
        """
        given = (train_dataloaders, val_dataloaders, dataloaders)
        holders = self._check_batch_size(model, datamodule, given, mode, method, batch_arg_name)
        for name, number in (("steps_per_trial", steps_per_trial), ("init_val", init_val)):
            check_whole(f"scale_batch_size: {name}", number, 1)
        job = _Job(model, datamodule, method, batch_arg_name, holders)
        limits = {"start": init_val, "trials": max_trials, "margin": margin, "most": max_val}
        return self._scale(job, steps_per_trial, {"mode": mode, **limits})

    def _scale(self, job: _Job, steps: int, limits: dict[str, Any]) -> int | None:
        if self._trainer.fast_dev_run:
            warnings.warn("scale_batch_size tries nothing in a fast_dev_run", stacklevel=3)
            return None
        before = [_get(holder, job.name) for holder in job.holders]
        options = _options_of(job.method, steps, self._trainer)
        found, tuned = None, None
        sizes: dict[int, Any] = {}
        own_limits = self._trainer.limits
        try:
            with trials(self._trainer, job.model, [job.datamodule], **options) as snapshot:

                def fits(size: int) -> int | None:
                    if sizes:
                        _say(
                            self._trainer, f"batch size {max(sizes)} fits, trying batch size {size}"
                        )
                    self._set_size(job, size)
                    if not self._fits(job, snapshot):
                        return None
                    loader = self._loader(job.method)
                    sizes[size] = getattr(loader, "batch_size", None)
                    self._check_is_used(sizes, job.name)
                    samples = length_of(getattr(loader, "dataset", None))
                    return size if samples == UNKNOWN else min(size, int(samples))

                found = search(fits, **limits)
                if found is not None and self._trainer.runtime.is_launched:
                    self._set_size(job, found)
                    asked = Job.of(job.method, job.model, None, job.datamodule, None)
                    tuned = with_data(self._trainer, asked, own_limits)
        finally:
            for holder, value in zip(job.holders, before, strict=True):
                _set(holder, job.name, value if found is None else found)
        if found is None:
            raise ConfigurationError(
                "scale_batch_size: not even a batch of one sample fits into memory: use a smaller "
                "model, another precision, or a strategy that shards or offloads"
            )
        if self._trainer._state.status != "running":  # there are loaders of the run's own then
            self._trainer._tuned = tuned
        _say(self._trainer, f"batch size {found} fits")
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
        if trainer.plan.world_size > 1:
            raise ConfigurationError(
                f"scale_batch_size with {trainer.plan.world_size} ranks: one that runs out of "
                "memory alone would leave the others waiting: tune with devices=1"
            )
        if holders := _holders((model, datamodule), name):
            return holders
        raise ConfigurationError(
            f"scale_batch_size: neither {type(model).__name__} nor a DataModule has {name!r}, as "
            f"an attribute or in hparams: let the loaders use self.{name}, or pass batch_arg_name"
        )

    def _fits(self, job: _Job, snapshot: Snapshot) -> bool:
        """Try once; False: memory ran out."""
        # Each trial begins anew, and not as a second fit of the model.
        self._trainer._run = None
        try:
            run = getattr(self._trainer, job.method)
            run(job.model, datamodule=job.datamodule, **_quiet(job.method))
        except Exception as error:
            if not self._trainer.strategy.accelerator.is_out_of_memory(error):
                raise
        else:
            snapshot.restore()
            return True
        # Here, where the error and with it the frames of the trial are gone.
        snapshot.restore()
        gc.collect()
        return False

    def _loader(self, method: Method) -> Any:
        run = self._trainer.run
        if method == "fit":
            return None if run.train_loader is None else run.train_loader.loader
        name = "validation" if method == "validate" else method
        return run.evaluation_loaders[name][0].loader

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
        """Train some steps at growing learning rates, and suggest one.

        Args:
            model: to be trained.
            train_dataloaders, val_dataloaders, dataloaders, datamodule: as for `Trainer.fit`; only
                training data is read.
            method: "fit"; no other run has a learning rate.
            min_lr, max_lr: the range.
            num_training: steps in it.
            mode: "exponential": each step multiplies; "linear": each adds.
            early_stop_threshold: end where the smoothed loss is more than so many times the best;
                None: never.
            update_attr: set the model's `lr` or `learning_rate`, or that in `hparams`, to what is
                suggested.
            attr_name: name of another attribute for it.

        Returns:
            The finder, with results, suggestion and plot; None: a `fast_dev_run` tries nothing.

        Raises:
            ConfigurationError: an argument is out of its range, there are several optimizers, or
                `update_attr` finds no attribute.
        """
        check_can_try(self._trainer)
        check_whole("lr_find: num_training", num_training, 1)
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
        if trainer.fast_dev_run:
            warnings.warn("lr_find tries nothing in a fast_dev_run", stacklevel=3)
            return None
        options = _options_of("fit", finder.num_training, trainer)
        with trials(trainer, job.model, (loaders, job.datamodule), **options) as snapshot:
            trainer.callbacks = [snapshot, Sweep(finder, threshold)]
            trainer.fit(job.model, loaders, datamodule=job.datamodule)
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
            _say(trainer, f"learning rate {suggested:.3g} suggested, set as {job.name}")
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


def _options_of(method: Method, steps: int, trainer: Trainer) -> dict[str, Any]:
    """Return the Trainer's attributes in which a trial differs."""
    if method == "fit":
        return {"max_steps": steps, "limits": {**trainer.limits, "val": 0}}
    return {"limits": dict.fromkeys(("train", "val", "test", "predict"), steps)}


def _say(trainer: Trainer, text: str) -> None:
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
