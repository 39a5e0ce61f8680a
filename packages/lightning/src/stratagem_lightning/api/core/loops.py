"""What scripts read of Lightning's loops, as views of a Trainer that has none of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from stratagem import trainer
from stratagem.data import CombinedLoader
from stratagem.errors import ConfigurationError
from stratagem_extras.callbacks.prediction_writer import BasePredictionWriter
from stratagem_lightning.api.core.connectors import (
    DataConnector,
    DataSource,
    Results,
    check_data,
    combined_loader,
    ignore_steps,
)
from stratagem_lightning.api.instance_check import Shown
from stratagem_lightning_plugin.checkpoint_format import loops_of


class Counts(NamedTuple):
    """Numbers of begun and ended items, which are equal whenever user code reads them."""

    ready: int
    started: int
    processed: int
    completed: int


class Progress(NamedTuple):
    """How far a loop is: in this epoch or run, and in all."""

    current: Counts
    total: Counts


def _progress(current: int, total: int) -> Progress:
    return Progress(Counts(*[current] * 4), Counts(*[total] * 4))


class _View:
    """Reads and sets what a Trainer has under a loop's names."""

    shown: tuple[str, ...] = ()

    def __init__(self, of: trainer.Trainer) -> None:
        refuse_own_loop(self)
        vars(self)["trainer"] = of

    def __getattr__(self, name: str) -> Any:
        if name not in self.shown:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r} here; expected one of "
                f"{', '.join(self.shown)}, which are read from the Trainer"
            )
        return getattr(vars(self)["trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.shown:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set here")
        setattr(vars(self)["trainer"], name, value)


def refuse_own_loop(loop: object) -> None:
    """Raise if a loop is a class of the user.

    Raises:
        ConfigurationError: the class is not part of Stratagem; the message names the replacement.
    """
    kind = type(loop)
    if not kind.__module__.startswith("stratagem"):
        raise ConfigurationError(
            f"{kind.__name__} is a loop of its own, and a Trainer has no loops that could be "
            "replaced: write the loop with Fabric, override training_step(self, dataloader_iter) "
            "to read batches, or use a callback's hooks between steps"
        )


class EvaluationLoop(_View):
    """`validate_loop` and `test_loop`. A subclass may override `_print_results`.

    Args:
        of: the Trainer that provides the values of the other arguments.
        *arguments, **options: the arguments of Lightning's loop.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> class Names(EvaluationLoop):
        ...     @staticmethod
        ...     def _print_results(results, stage):
        ...         print(stage, *results[0])
        >>> trainer = Trainer(accelerator="cpu")
        >>> trainer.test_loop = Names(trainer)
    """

    shown = ("trainer", "inference_mode")

    _what = ""
    """The kind of its loaders; "": that of the present run."""

    def __init__(self, of: trainer.Trainer, *arguments: Any, **options: Any) -> None:
        vars(self)["trainer"] = of

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_print_results":
            super().__setattr__(name, value)
            return
        vars(self)[name] = value
        of = self.trainer
        if of.state.fn in ("validate", "test"):
            of._loops[of.state.fn] = self

    @Shown
    def max_batches(self) -> list[float]:
        """The number of batches of each loader."""
        what = self._what or self._stage
        found: list[float] = self.trainer.batches_of(what)
        return found

    @Shown
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        loaders = self.trainer.loaders_of(self._what or self._stage)
        return combined_loader(loaders, "sequential")

    @property
    def _stage(self) -> str:
        stages = {"validate": "validation", "fit": "validation"}
        return stages.get(str(self.trainer.state.fn), str(self.trainer.state.fn))

    @property
    def _results(self) -> Results:
        return Results(self.trainer)

    @staticmethod
    def _print_results(results: list[dict[str, Tensor]], stage: str) -> None:
        """Print the values of each loader."""
        for name, value in (pair for one in results for pair in one.items()):
            print(f"{stage} {name}: {float(value):.6g}")

    @property
    def verbose(self) -> bool:
        """Whether the values are printed; those of a validation within a fit are not."""
        return self.trainer.state.fn != "fit" and bool(self.trainer._verbose)

    @property
    def batch_progress(self) -> Progress:
        """The batches of the last run."""
        run = self.trainer.latest_run
        count = 0 if run is None else run.evaluation.batches
        return _progress(count, count)


class ValidationLoop(EvaluationLoop):
    """`fit_loop.epoch_loop.val_loop`."""

    _what = "validation"

    @property
    def _data_source(self) -> DataSource:
        run = self.trainer.latest_run
        if run is not None and run.stage == "fit" and not run.validation.loaders:
            return DataSource(None, "")  # also if limit_val_batches=0 leaves it out
        return DataConnector(self.trainer)._val_dataloader_source

    @property
    def _has_run(self) -> bool:
        return self.trainer.latest_run is not None and self.trainer.latest_run.state.validated > 0

    @property
    def batch_progress(self) -> Progress:
        """The numbers of batches of the last validation, and of all validations in this epoch."""
        run, progress = self.trainer.latest_run, self.trainer.fit_state
        if run is None or run.stage != "fit":
            return _progress(0, 0)
        own = run.validation
        has_begun = progress.batches > 0
        is_of_this_epoch = own.last_epoch == progress.epoch - (not has_begun)
        return _progress(own.last_batches, own.batches_of_epoch if is_of_this_epoch else 0)


class PredictionLoop(EvaluationLoop):
    """`predict_loop`."""

    @property
    def return_predictions(self) -> bool:
        """Whether `predict` keeps the results of `predict_step`."""
        run = self.trainer.latest_run
        return run is None or run.job.keeps_predictions

    @property
    def predictions(self) -> list[Any]:
        """The results of `predict_step` so far; with several loaders, a list for each."""
        run = self.trainer.latest_run
        kept = [] if run is None else list(run.evaluation.predictions)
        return kept[0] if len(kept) == 1 else kept

    @property
    def epoch_batch_indices(self) -> list[list[Any]]:
        """The samples of each batch that a BasePredictionWriter keeps, a list for each loader."""
        for callback in self.trainer.callbacks:
            if isinstance(callback, BasePredictionWriter):
                return callback.epoch_batch_indices
        return [[] for _ in self.trainer.num_predict_batches]


class EpochLoop(_View):
    """`fit_loop.epoch_loop`."""

    shown = ("trainer", "max_steps", "min_steps", "global_step")

    @property
    def batch_idx(self) -> int:
        """The index in its epoch of the present or last training batch; -1 before the first."""
        run = self.trainer.latest_run
        if run is not None and run.stage == "fit" and run.step is None:
            return int(self.trainer._last_batch_idx)
        return self._position

    @property
    def total_batch_idx(self) -> int:
        """The index over all epochs of the present or last training batch; -1 before the first."""
        return int(self.trainer.fit_state.batches_before) + self._position

    @property
    def _position(self) -> int:
        """The index in this epoch of the present or last training batch; -1 before the first."""
        run, done = self.trainer.latest_run, int(self.trainer.batches_that_trained)
        step = None if run is None else run.step
        # Between two epochs nothing is under way, and nothing is done.
        if step is None or (not done and not step.is_under_way):
            return done - 1
        return int(step.last_batch_idx)

    @property
    def batch_progress(self) -> Progress:
        """The numbers of training batches in this epoch, and in all epochs."""
        count = self.trainer.batches_that_trained
        return _progress(count, self.trainer.fit_state.batches_before + count)

    @property
    def _batches_that_stepped(self) -> int:
        """The step of the values that are logged now."""
        run = self.trainer.latest_run
        # The hooks of a batch's end see the step before its count, as in Lightning.
        ends_batch = run is not None and run.step is not None and run.metrics.in_step
        if ends_batch and not run.step.is_under_way:
            return int(self.trainer.fit_state.logged_step)
        return int(self.trainer.global_step)

    @property
    def _is_training_done(self) -> bool:
        return bool(self.trainer.fit_loop.done)

    def _should_accumulate(self) -> bool:
        """Whether the present batch takes no optimizer step of its own."""
        of = self.trainer
        is_whole = (self.batch_idx + 1) % of.accumulate_grad_batches == 0
        return not (is_whole or of.is_last_batch)

    def _should_check_val_epoch(self) -> bool:
        """Whether validation runs in this epoch."""
        of, run = self.trainer, self.trainer.latest_run
        return bool(
            run is not None
            and of.enable_validation
            and run.validation.is_in_epoch(of.current_epoch)
        )

    @property
    def _results(self) -> Results:
        return Results(self.trainer)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_batches_that_stepped":
            ignore_steps(value)
        else:
            super().__setattr__(name, value)

    @property
    def automatic_optimization(self) -> AutomaticOptimization:
        """The optimizer steps that the Trainer takes."""
        return AutomaticOptimization(self.trainer)

    @property
    def manual_optimization(self) -> ManualOptimization:
        """The optimizer steps that the model takes."""
        return ManualOptimization(self.trainer)

    @property
    def val_loop(self) -> ValidationLoop:
        """The validation within a fit."""
        return ValidationLoop(self.trainer)


class Steps(NamedTuple):
    """Numbers of begun and ended optimizer steps."""

    ready: int
    completed: int


class StepProgress(NamedTuple):
    """The optimizer steps of this epoch, and of all."""

    current: Steps
    total: Steps


class OptimizationProgress:
    """`optim_progress` of automatic optimization.

    Args:
        of: the Trainer.

    Attributes:
        optimizer_steps: the number of optimizer steps.
    """

    def __init__(self, of: Any) -> None:
        self.optimizer_steps: int = of.global_step if _is_automatic(of) else 0
        self.optimizer = self
        """The optimizer's part, which has the same `step`."""
        self.step = _steps(of) if _is_automatic(of) else _no_steps()


class AutomaticOptimization:
    """`fit_loop.epoch_loop.automatic_optimization`.

    Args:
        of: the Trainer.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> loop = Trainer(accelerator="cpu").fit_loop.epoch_loop
        >>> loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        0
    """

    def __init__(self, of: Any) -> None:
        self.optim_progress = OptimizationProgress(of)


class ManualOptimization:
    """`fit_loop.epoch_loop.manual_optimization`.

    Args:
        of: the Trainer.

    Attributes:
        optim_step_progress: the steps of all optimizers.
    """

    def __init__(self, of: Any) -> None:
        self.optim_step_progress = _no_steps() if _is_automatic(of) else _steps(of)


def _is_automatic(of: Any) -> bool:
    return of.model is None or bool(of.model.automatic_optimization)


def _steps(of: Any) -> StepProgress:
    """Return the steps; those of this epoch are taken of its batches."""
    per_step = max(1, of.accumulate_grad_batches)
    current = min(of.global_step, -(-of.batches_that_trained // per_step))
    return StepProgress(Steps(current, current), Steps(of.global_step, of.global_step))


def _no_steps() -> StepProgress:
    return StepProgress(Steps(0, 0), Steps(0, 0))


_LIMITS = {"max_epochs": -1, "max_steps": -1, "min_epochs": 0, "min_steps": 0}
"""The limits of a fit, and the value of each that means "no limit"."""


class FitLoop:
    """`trainer.fit_loop`: the limits of a fit, which may be set between and within fits.

    Args:
        of: the Trainer.

    Example:
        >>> from stratagem_lightning.api.trainer import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.fit_loop.max_epochs = 3
        >>> trainer.max_epochs
        3
    """

    trainer: Any

    def __init__(self, of: trainer.Trainer, *limits: Any, **options: Any) -> None:
        refuse_own_loop(self)
        vars(self)["trainer"] = of

    def __getattr__(self, name: str) -> Any:
        if name in _LIMITS and "trainer" in vars(self):
            return getattr(self.trainer, name)
        if name == "trainer":  # a copy, before it has one
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.fit_loop has no {name!r}; expected one of {', '.join(_LIMITS)}, epoch_loop, "
            "batch_idx and total_batch_idx"
        )

    def __setattr__(self, name: str, value: int | None) -> None:
        if name not in _LIMITS:
            raise AttributeError(
                f"trainer.fit_loop.{name} cannot be set; expected one of {', '.join(_LIMITS)}"
            )
        setattr(self.trainer, name, _LIMITS[name] if value is None else value)

    @property
    def current_epoch(self) -> int:
        """The epoch, counted from 0."""
        epoch: int = self.trainer.current_epoch
        return epoch

    @property
    def epoch_loop(self) -> EpochLoop:
        """The loop over batches."""
        return EpochLoop(self.trainer)

    @property
    def epoch_progress(self) -> Progress:
        """The epochs that were trained."""
        return _progress(self.trainer.current_epoch, self.trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the form that Lightning's checkpoints contain."""
        found: dict[str, Any] = loops_of(self.trainer.fit_state.state_dict())["fit_loop"]
        return found

    @property
    def batch_idx(self) -> int:
        """The index in this epoch of the present or last training batch; -1 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index over all epochs of the present or last training batch; -1 before the first."""
        return self.epoch_loop.total_batch_idx

    @property
    def max_batches(self) -> float:
        """Batches of an epoch."""
        return float(self.trainer.num_training_batches)

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        run = self.trainer.latest_run
        data = None if run is None else run.fit_data
        loader = None if data is None else data.loader.loader
        return combined_loader(loader, "max_size_cycle")

    @property
    def _data_source(self) -> DataSource:
        return DataConnector(self.trainer)._train_dataloader_source

    @property
    def _results(self) -> Results:
        return Results(self.trainer)

    @property
    def _can_stop_early(self) -> bool:
        of = self.trainer
        return bool(
            of.current_epoch >= (of.min_epochs or 0) and of.global_step >= (of.min_steps or 0)
        )

    def _should_accumulate(self) -> bool:
        """Whether the present batch takes no optimizer step of its own."""
        return self.epoch_loop._should_accumulate()

    def setup_data(self) -> None:
        """Check that a fit is running; the fit has created its loaders before its first hook.

        Raises:
            ConfigurationError: no fit is running.
        """
        check_data(self.trainer)

    @property
    def done(self) -> bool:
        """Whether a limit is reached."""
        of = self.trainer
        return bool(
            of.should_stop
            or of.limit_train_batches == 0
            or -1 < of.max_steps <= of.global_step
            or -1 < of.options.max_epochs <= of.current_epoch
        )
