"""What libraries read of the private parts of Lightning's Trainer, as views of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stratagem import callbacks as own
from stratagem.data import CombinedLoader
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn
from stratagem_extras.tuner import LearningRateFinder
from stratagem_lightning.api.callbacks.finders import BatchSizeFinder
from stratagem_lightning_plugin.checkpoint_format import to_lightning

_WEIGHTS_ONLY = ("callbacks", "optimizer_states", "lr_schedulers", "loops")
"""Entries of a checkpoint that one of the weights alone does not have."""


class _Part:
    """A view of a Trainer; an unknown name raises an error that lists the known names.

    Args:
        trainer: the Trainer.
    """

    place = ""
    instead = ""

    def __init__(self, trainer: Any) -> None:
        vars(self)["trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.{self.place} has no {name!r} in Stratagem; expected one of "
            f"{', '.join(_names_of(type(self)))}; {self.instead}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass of the user's has attributes of its own.
        if not type(self).__module__.startswith("stratagem"):
            super().__setattr__(name, value)
            return
        raise AttributeError(
            f"trainer.{self.place}.{name} cannot be set in Stratagem; {self.instead}"
        )


def _names_of(kind: type) -> list[str]:
    """Return the names that a view has, for an error."""
    apart = {*vars(_Part), *vars(object)}
    return [name for name in dir(kind) if name not in apart and not name.startswith("__")]


class CheckpointConnector(_Part):
    """`trainer._checkpoint_connector`.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> Trainer(accelerator="cpu")._checkpoint_connector.restore("last.ckpt")
        Traceback (most recent call last):
        ...
        AttributeError: trainer._checkpoint_connector has no 'restore' in Stratagem; expected one \
of dump_checkpoint; use trainer.save_checkpoint() and the argument ckpt_path
    """

    place = "_checkpoint_connector"
    instead = "use trainer.save_checkpoint() and the argument ckpt_path"

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return a checkpoint of the present run with Lightning's keys; called on every rank."""
        checkpoint = to_lightning(self.trainer.run.checkpoint())
        kept = checkpoint.items()
        return {n: one for n, one in kept if not weights_only or n not in _WEIGHTS_ONLY}


class LoggerConnector(_Part):
    """`trainer._logger_connector`."""

    place = "_logger_connector"
    instead = "use trainer.callback_metrics, logged_metrics and progress_bar_metrics"

    @property
    def should_update_logs(self) -> bool:
        """Whether the values of the present training step go to the loggers."""
        of = self.trainer
        every = of.log_every_n_steps
        if not every:
            return False
        steps = of.fit_loop.epoch_loop._batches_that_stepped
        return bool((steps + 1) % every == 0 or of.should_stop)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """`trainer.callback_metrics`."""
        values: dict[str, Any] = self.trainer.callback_metrics
        return values

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """`trainer.logged_metrics`."""
        values: dict[str, Any] = self.trainer.logged_metrics
        return values

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """`trainer.progress_bar_metrics`."""
        values: dict[str, float] = self.trainer.progress_bar_metrics
        return values

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write values to every logger, on rank 0; without a step, at the present one."""
        if not self.trainer.is_global_zero:
            return
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else step
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=metrics, step=step)


class Results(_Part):
    """`trainer._results`."""

    place = "_results"
    instead = "use trainer.callback_metrics"
    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def metrics(self, on_step: bool) -> dict[str, dict[str, Any]]:
        """Return the latest values for callbacks, for loggers and for the bar."""
        of = self.trainer
        return {
            "callback": of.callback_metrics,
            "log": of.logged_metrics,
            "pbar": of.progress_bar_metrics,
        }


class DataSource(NamedTuple):
    """Where loaders come from; `fit_loop._data_source`.

    Args:
        instance: the loaders that were passed, else the DataModule, else the model.
        name: of the method that returns them; "": they were passed.
    """

    instance: Any
    name: str

    def dataloader(self) -> Any:
        """Return the loaders, as the user made them."""
        return getattr(self.instance, self.name)() if self.name else self.instance

    def is_defined(self) -> bool:
        """Whether there are any."""
        return self.instance is not None

    def is_module(self) -> bool:
        """Whether a model or a DataModule makes them."""
        return bool(self.name)


def source_of(trainer: Any, name: str, passed: str) -> DataSource:
    """Return where loaders of the present run come from.

    Args:
        trainer: the Trainer.
        name: of the method.
        passed: the attribute of the job that holds loaders that were passed.
    """
    run = trainer.latest_run
    if run is None:
        return DataSource(None, "")
    loaders = getattr(run.job, passed)
    if loaders is not None:
        return DataSource(loaders, "")
    for instance in (run.datamodule, run.module):
        if instance is not None and instance.defines(name):
            return DataSource(instance, name)
    return DataSource(None, "")


def combined_loader(loader: Any, mode: str) -> CombinedLoader | None:
    """Return a loader of this rank as a CombinedLoader.

    None: there is no loader.
    """
    if loader is None or isinstance(loader, CombinedLoader):
        return loader
    return CombinedLoader(loader, mode)  # type: ignore[arg-type]


class DataConnector(_Part):
    """`trainer._data_connector`."""

    place = "_data_connector"
    instead = "use trainer.train_dataloader, val_dataloaders and datamodule"

    @property
    def _train_dataloader_source(self) -> DataSource:
        return source_of(self.trainer, "train_dataloader", "loaders")

    @property
    def _val_dataloader_source(self) -> DataSource:
        run = self.trainer.latest_run
        passed = "val_loaders" if run is not None and run.stage == "fit" else "loaders"
        return source_of(self.trainer, "val_dataloader", passed)

    @property
    def _test_dataloader_source(self) -> DataSource:
        return source_of(self.trainer, "test_dataloader", "loaders")

    @property
    def _predict_dataloader_source(self) -> DataSource:
        return source_of(self.trainer, "predict_dataloader", "loaders")

    @property
    def _datahook_selector(self) -> Hooked:
        return Hooked(self.trainer.lightning_module, self.trainer.datamodule)


class Hooked(NamedTuple):
    """The objects whose hooks convert batches."""

    model: Any
    datamodule: Any


class SignalConnector(_Part):
    """`trainer._signal_connector`."""

    place = "_signal_connector"
    instead = "use trainer.should_stop and the hook on_exception"

    @property
    def received_sigterm(self) -> bool:
        """Whether a signal is to end the present run."""
        return bool(self.trainer.received_sigterm)


class CallbackConnector(_Part):
    """`trainer._callback_connector`, which a subclass may replace to choose default callbacks.

    A subclass of Trainer that sets another connector when `_callback_connector` is set gets its
    default callbacks from it.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import ModelCheckpoint, Timer
        >>> saver, timer = ModelCheckpoint(), Timer()
        >>> CallbackConnector._reorder_callbacks([saver, timer]) == [timer, saver]
        True
    """

    place = "_callback_connector"
    instead = "use trainer.callbacks"

    def _configure_checkpoint_callbacks(self, enable_checkpointing: bool) -> None:
        """Add a ModelCheckpoint, unless there is one."""
        self._add(enable_checkpointing, own.ModelCheckpoint, "ModelCheckpoint", at=None)

    def _configure_progress_bar(self, enable_progress_bar: bool = True) -> None:
        """Add a progress bar, unless there is one."""
        self._add(enable_progress_bar, own.ProgressBar, "RichProgressBar", at=0)

    def _add(self, wanted: bool, kind: type, default: str, at: int | None) -> None:
        listed = self.trainer.callbacks
        if wanted and not any(isinstance(one, kind) for one in listed):
            from stratagem_lightning import pytorch

            made = getattr(pytorch.callbacks, default)()
            listed.insert(len(listed) if at is None else at, made)

    def _attach_model_callbacks(self) -> None:
        """Add the callbacks that the model configures, in the place of those of their classes."""
        of = self.trainer
        given = of.lightning_module.configure_callbacks()
        added = [given] if isinstance(given, own.Callback) else list(given)
        kinds = {type(one) for one in added}
        kept = [one for one in of.callbacks if type(one) not in kinds]
        of.callbacks = self._reorder_callbacks([*kept, *added])

    def _attach_model_logging_functions(self) -> None:
        """Nothing: a callback's `log` finds the model by itself."""

    @staticmethod
    def _reorder_callbacks(callbacks: list[Any]) -> list[Any]:
        """Return callbacks of the tuner first and ModelCheckpoints last."""

        def place(callback: Any) -> int:
            if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
                return 0
            return 2 if isinstance(callback, own.ModelCheckpoint) else 1

        return sorted(callbacks, key=place)


PARTS: dict[str, Callable[[Any], Any]] = {
    "_checkpoint_connector": CheckpointConnector,
    "_data_connector": DataConnector,
    "_logger_connector": LoggerConnector,
    "_signal_connector": SignalConnector,
    "_results": Results,
}
"""The private attributes of a Trainer, and the view that each of them is."""


def ignore_steps(step: int) -> None:
    """Warn that the number of steps was set, which a resumed run has from its checkpoint."""
    rank_zero_warn(
        f"epoch_loop._batches_that_stepped = {step} has no effect: a run that resumes by ckpt_path "
        "logs at the steps that follow its checkpoint's; log a value named 'step' for another axis"
    )


def check_data(trainer: Any) -> None:
    """Check that a loop's `setup_data()` is called within a fit, which has made its loaders.

    Raises:
        ConfigurationError: no fit is running.
    """
    if trainer.latest_run is None or trainer.latest_run.fit_data is None:
        raise ConfigurationError(
            "trainer.fit_loop.setup_data() works within a fit, once its loaders are made; expected "
            "a hook from on_fit_start on"
        )
