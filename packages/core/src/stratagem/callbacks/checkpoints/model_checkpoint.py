"""ModelCheckpoint: saves checkpoints during training, and removes old ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.callbacks.checkpoints.names import CheckpointNames, NotYet, filled, names_in
from stratagem.callbacks.checkpoints.resumed import ResumedCheckpoints, in_folder, leads_to
from stratagem.callbacks.checkpoints.retention import RetentionPolicy, SaveEvent, SavePlan
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer
    from stratagem.trainer.resume.checkpoint import Weights


_IN_KEY = (
    *("monitor", "mode", "filename", "save_top_k", "keep_latest_k", "save_weights_only"),
    *("every_n_train_steps", "every_n_epochs", "train_time_interval"),
)
"""The arguments in a ModelCheckpoint's `state_key`, before the folder."""


class ModelCheckpoint(Callback):
    """Saves checkpoints during training.

    Saves by steps, epochs and time can be combined. Only files of this run, or of the run that it
    resumes, are ever removed or replaced. If another run has saved or is about to save under a
    name, this run adds `-v1`, `-v2` and so on. So does a second fit of the same Trainer, which is
    another run unless it resumes. A resumed run does the same for names that the interrupted run
    has used after the resumed checkpoint. A checkpoint that a fit's `ckpt_path` names is kept
    beyond `save_top_k`, so that the same command works again. A checkpoint that `ckpt_path="last"`
    found is removed like any other.

    Args:
        dirpath: the folder for checkpoints, a local path or a URL ("s3://bucket/run"). With None,
            a folder `checkpoints` beside the logs.
        filename: the file name without `.ckpt`, with values in braces: "{epoch}-{val_acc:.3f}".
            With None, "epoch=E-step=S".
        auto_insert_metric_name: whether to write each value's name before it, "epoch=3", or only
            the value.
        enable_version_counter: whether to add `-v1` and so on to names that exist. If False,
            existing files are replaced, even files of another run.
        verbose: whether to print each saved checkpoint on rank 0.
        monitor: the logged value that ranks the checkpoints, or "epoch" or "step". With None, the
            newest checkpoints are the best.
        mode: "min" if smaller values are better, or "max".
        save_top_k: the number of best checkpoints to keep (without `monitor`, of newest ones). -1
            keeps all checkpoints, 0 keeps no checkpoint.
        keep_latest_k: the number of newest checkpoints to keep as well, whatever their values.
        save_last: whether to keep the newest checkpoint and point `last.ckpt` to it: a symbolic
            link, or a copy on an object store. `last.ckpt` moves once the newest checkpoint is
            durable. "link" means True.
        save_weights_only: whether to omit optimizer and loop state.
        every_n_train_steps: the number of optimizer steps between saves; 0 disables saves by steps.
        every_n_epochs: the number of epochs between saves; 0 disables saves by epochs. Defaults to
            1 if neither steps nor time are given.
        train_time_interval: the time between saves. With several ranks, half a second may be
            added, since ranks synchronize the time about twice a second.
        save_on_train_epoch_end: whether to save at the end of the training epoch, when the values
            of training and validation are available. If False, save after validation, if the fit
            has one. With None, save after validation if it runs within epochs.
        save_on_exception: whether to save `exception-step=S.ckpt` when an error or Ctrl-C ends
            training. This works with a single rank only, since other ranks may be at another step.

    If weights are not finite, a warning is printed once. Only the newest of such checkpoints is
    kept, in addition to the finite ones; with `save_top_k=-1`, all are. It counts neither as best
    nor as newest, and `last.ckpt` does not move. A monitored value of NaN is the worst.

    With `monitor`, an epoch without validation adds a best checkpoint only if its training logs the
    value, or if no epoch has validation. A value in `filename` that is not logged yet, such as a
    value of the first validation, is written as `none`; a warning is printed once. A save by steps
    or time waits for the next validation, if that runs before the next batch, or if the value was
    not logged yet; in the latter case a warning is printed once. A signal that ends training saves
    `interrupted-step=S.ckpt`. This file, and the file of an error, are kept until the resumed run
    has saved another checkpoint.

    Attributes:
        best_model_path: the path of the best checkpoint of the last fit so far, or "".
        best_model_score: the value of the best checkpoint, or None.
        best_k_models: the values of the best checkpoints, by path.
        kth_best_model_path: the path of the worst of the best checkpoints, or "".
        current_score: the most recent monitored value, or None.
        last_model_path: the path of this run's `last.ckpt`, or "".

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}")
        >>> Trainer(callbacks=best, logger=False).checkpoint_callback is best
        True

        Save every 1000 steps and every half hour; keep the three best and the two newest:

        >>> from datetime import timedelta
        >>> saver = ModelCheckpoint(
        ...     monitor="val_acc", mode="max", save_top_k=3, keep_latest_k=2, save_last=True,
        ...     every_n_train_steps=1000, train_time_interval=timedelta(minutes=30),
        ... )
    """

    runs_after_metrics = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        keep_latest_k: int = 0,
        save_last: bool | Literal["link"] | None = False,
        save_weights_only: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_on_exception: bool = False,
        auto_insert_metric_name: bool = True,
        enable_version_counter: bool = True,
        verbose: bool = False,
    ) -> None:
        self._folder: paths.Location | None
        self.dirpath = dirpath
        self.filename = filename or "{epoch}-{step}"
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.keep_latest_k = keep_latest_k
        self.save_last = bool(save_last)
        self.save_weights_only = save_weights_only
        self.every_n_train_steps = every_n_train_steps
        if every_n_epochs is None and every_n_train_steps is None and train_time_interval is None:
            every_n_epochs = 1
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.save_on_exception = save_on_exception
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self._check_arguments()
        arguments = [(name, getattr(self, name)) for name in _IN_KEY]
        listed = ", ".join(f"{name}={value}" for name, value in arguments if value is not None)
        self._key_before_folder = f"ModelCheckpoint({listed}, dirpath="
        self._key = f"{self._key_before_folder}{dirpath})"
        # Without a monitor the value is the step, so the newest checkpoints are the best.
        self._empty_policy = RetentionPolicy(
            "max" if monitor is None else mode,
            top_k=save_top_k,
            latest_k=max(keep_latest_k, int(self.save_last)),
        )
        self._names = CheckpointNames(replaces=not enable_version_counter)
        self._reset()
        self._warned: set[str] = set()
        """On rank 0, the warnings of this fit."""
        self._is_training = False
        self._waits = False
        """Whether a save waits for the monitored value."""
        self._last_step_saved = -1
        self._last_time_saved = 0.0

    def _reset(self) -> None:
        """Forget the checkpoints of an earlier fit: for the next one they are another run's."""
        self._policy = self._empty_policy.copy()
        self.current_score: float | None = None
        self.last_model_path = ""
        self._resumed: dict[str, Any] | None = None
        """The loaded state, until rank 0 has checked which of its files still exist."""
        self._resumed_save: tuple[int, bool] | None = None
        """For a resumed run, the last saved step, and whether a save waits for a value."""
        self._protected: set[str] = set()
        """On rank 0, older checkpoints that must not be removed, since another run may own them."""

    def _check_arguments(self) -> None:
        mode, interval = self.mode, self.train_time_interval
        if mode not in ("min", "max"):
            raise ConfigurationError(f"ModelCheckpoint(mode={mode!r}): expected 'min' or 'max'")
        if interval is not None and not isinstance(interval, timedelta):
            raise ConfigurationError(
                f"ModelCheckpoint(train_time_interval={interval!r}): expected a "
                "datetime.timedelta, such as timedelta(minutes=30)"
            )
        if self.save_top_k < -1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={self.save_top_k!r}): expected a number of "
                "checkpoints, or -1 for all"
            )
        for name in ("keep_latest_k", "every_n_train_steps", "every_n_epochs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"ModelCheckpoint({name}={value}): expected at least 0")

    @property
    def dirpath(self) -> Any:
        """The folder for checkpoints, a `pathlib.Path` or a URL; unset before a run by default."""
        return self._folder

    @dirpath.setter
    def dirpath(self, folder: str | Path | paths.Location | None) -> None:
        self._folder = None if folder is None else paths.parse_user_path(folder)

    @property
    def best_k_models(self) -> dict[str, float]:
        """The values of the best checkpoints, by path."""
        return self._policy.best

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint so far, or ""."""
        return self._policy.best_path()

    @property
    def kth_best_model_path(self) -> str:
        """The path of the worst of the best checkpoints, or ""."""
        return self._policy.worst_path()

    @property
    def best_model_score(self) -> float | None:
        """The value of the best checkpoint, if a value is monitored."""
        return self._policy.best.get(self.best_model_path) if self.monitor is not None else None

    @property
    def kept_paths(self) -> list[str]:
        """The paths of all checkpoints that are kept."""
        return self._policy.all_paths()

    # -- when to save

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Begin anew, and choose the folder for checkpoints, the same on every rank."""
        if stage == "fit":
            self._reset()
        if stage == "fit" and not trainer.options.fast_dev_run:
            self.choose_folder(trainer)

    def choose_folder(self, trainer: Trainer) -> None:
        """Choose the folder if `dirpath` is unset: beside the logs, or at the Trainer's URL."""
        if self._folder is None:
            root = trainer.options.default_root_dir
            root = root if paths.is_url(root) else Path(trainer.log_dir)
            self._folder = paths.join(root, "checkpoints")
        self._folder = paths.to_location(trainer.ranks.broadcast(str(self._folder)))

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Forget checkpoints of a resumed run that no longer exist."""
        self._forget_missing_files(trainer)
        if self.save_on_exception and trainer.world_size > 1 and trainer.is_global_zero:
            warnings.warn(
                f"ModelCheckpoint(save_on_exception=True) saves nothing with {trainer.world_size} "
                "ranks: when an error or Ctrl-C ends one, the others are elsewhere. SIGTERM saves "
                "in any case; train_time_interval limits what an error costs",
                stacklevel=2,
            )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Start the clock, and mark the resumed step as saved."""
        self._warned.clear()
        self._is_training = not trainer.options.fast_dev_run
        self._last_time_saved = trainer.run.interruption.agreed_time()
        self._last_step_saved, self._waits = self._resumed_save or (trainer.global_step, False)
        self._resumed_save = None

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if enough steps or time have passed."""
        step = trainer.global_step
        # Not within a step: a new checkpoint must exist before an older one is removed.
        if trainer.is_within_step or step == self._last_step_saved:
            return
        every, interval = self.every_n_train_steps, self.train_time_interval
        if (every and step % every == 0) or (
            interval is not None
            and trainer.run.interruption.agreed_time() - self._last_time_saved
            >= interval.total_seconds()
        ):
            # The validation that follows computes the value for exactly these weights.
            self._waits = self._monitors_logged and trainer.run.validation.is_next
            if not self._waits:
                self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Save after validation, unless saves are set to the end of the training epoch."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        is_due = not self._after_training_epoch(trainer) and self._epoch_is_due(trainer)
        if self._is_awaited(trainer) or is_due:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Save after the training epoch, unless saves are set to the end of validation."""
        if self._is_awaited(trainer):
            self._save(trainer)
        elif self._after_training_epoch(trainer) and self._epoch_is_due(trainer):
            # The monitored value may be from an earlier epoch, or not logged yet.
            run = trainer.run
            known = run.state.validated > 0 or not run.validation.loaders
            known |= self.monitor in run.state.logged_in_epoch
            if not self._monitors_logged:
                # A limit may end a fit before the validation of its epoch.
                known |= run.validation.is_in_epoch(trainer.current_epoch)
            self._save(trainer, among_best=known or self.monitor is None)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Mark training as complete, so that a later error saves nothing."""
        self._is_training = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Save the current state, if `save_on_exception` is set."""
        if (
            self.save_on_exception
            and self._is_training
            and trainer.world_size == 1
            and trainer.global_step != self._last_step_saved
            and not isinstance(exception, (CheckpointError, SystemExit))
        ):
            try:
                self.save_to_resume_from(trainer, "exception")
            except Exception as error:
                # Only warn, so that the user sees the first error.
                warnings.warn(f"after {exception!r}, saving failed: {error}", stacklevel=2)
        self._end()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Release the claimed names."""
        self._end()

    def _end(self) -> None:
        self._is_training = False
        self._names.release_all()

    def _after_training_epoch(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is None:
            return not trainer.run.validation.runs_within_epochs
        return self.save_on_train_epoch_end or not trainer.run.validation.loaders

    @property
    def _monitors_logged(self) -> bool:
        return self.monitor is not None and self.monitor not in ("epoch", "step")

    def _is_awaited(self, trainer: Trainer) -> bool:
        """Return whether a save waits for a value that is now available, and stop waiting."""
        is_saved = trainer.global_step == self._last_step_saved and self._keeps_latest
        name = self.monitor
        if not self._waits or name is None or is_saved or trainer.run.monitor.is_pending(name):
            return False
        self._waits = False
        return True

    @property
    def _keeps_latest(self) -> bool:
        return bool(self.keep_latest_k or self.save_last)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        if not self.every_n_epochs or trainer.global_step == self._last_step_saved:
            return False
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    # -- saving

    def _save(self, trainer: Trainer, *, among_best: bool = True) -> None:
        if trainer.options.fast_dev_run:
            return
        self._last_step_saved = trainer.global_step
        self._last_time_saved = trainer.run.interruption.agreed_time()
        metric = self._monitored(trainer) if among_best and self.save_top_k != 0 else None
        if metric is not None and not self._policy.is_among_best(metric):
            metric = None
        if metric is not None or self._keeps_latest:
            self._write(trainer, metric)

    def _write(self, trainer: Trainer, metric: float | None) -> None:
        """Save a checkpoint, as a best one if it has a metric; remove those that it replaces."""
        weights = self._weights(trainer)
        plan = self._plan(trainer, metric, is_finite=not weights.nonfinite)
        self._execute(trainer, plan, weights)
        if self.verbose:
            score = f", {self.monitor} {metric:.4g}" if self.monitor and metric is not None else ""
            trainer.print(f"stratagem: ModelCheckpoint: saved {plan.path}{score}")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                tell = partial(logger.after_save_checkpoint, self)
                trainer.strategy.checkpoint_io.when_durable(tell)

    def _plan(self, trainer: Trainer, metric: float | None, *, is_finite: bool) -> SavePlan:
        """Decide what to write, link and remove; claims the names of new files."""
        assert self._folder is not None
        names, ranks = self._names, trainer.ranks
        event = SaveEvent(
            filename=self._name(trainer),
            metric=metric,
            is_finite=is_finite,
            link_name=self._name_of_last(trainer) if self.save_last else "",
            link=self.last_model_path,
            protected=self._protected,
        )
        choose_path = partial(names.choose, ranks, self._folder)
        return self._policy.plan(event, choose_path, partial(names.may_move, ranks))

    def _execute(self, trainer: Trainer, plan: SavePlan, weights: Weights) -> None:
        """Write, link and remove; an error of the write restores the former state."""
        former = self._policy, self.last_model_path
        # Update the state first, so that the checkpoint itself contains it.
        self._policy, self.last_model_path = plan.policy, plan.link or self.last_model_path
        try:
            self._save_file(trainer, plan.path, weights)
        except BaseException:
            self._policy, self.last_model_path = former
            raise
        # `last` moves once its new target is durable; the old target is removed after that.
        if plan.link and not self._link_file(trainer, plan.path, plan.link):
            self._save_file(trainer, plan.link, weights)
        for path in plan.remove:
            self._remove_file(trainer, path)
        self._names.release()

    def _save_file(self, trainer: Trainer, path: str, weights: Weights) -> None:
        only = self.save_weights_only
        trainer.run.saves.save(paths.to_location(path), weights_only=only, weights=weights)

    def _link_file(self, trainer: Trainer, target: str, path: str) -> bool:
        return trainer.checkpoint_writer.link(target, path)

    def _remove_file(self, trainer: Trainer, path: str) -> None:
        trainer.checkpoint_writer.remove(path)

    def _monitored(self, trainer: Trainer) -> float | None:
        """Return the monitored value of the current checkpoint; None if not logged yet."""
        positions = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        name = "step" if self.monitor is None else self.monitor
        if name in positions and (self.monitor is None or name not in trainer.callback_metrics):
            position = self.current_score = float(positions[name])
            return position
        if trainer.run.monitor.is_pending(name):
            self._waits = True
            if not self._keeps_latest:
                self._warn_once(
                    trainer,
                    f"ModelCheckpoint(monitor={name!r}): there is no value yet",
                    "Saves are deferred until it is logged; keep_latest_k=1 saves in any case",
                )
            return None
        mean = trainer.run.monitor.mean_over_ranks(name, "ModelCheckpoint")
        value = self.current_score = float(mean)
        if math.isnan(value):
            self._warn_once(
                trainer,
                f"ModelCheckpoint(monitor={name!r}): the value is NaN",
                "NaN is the worst value in either mode: such a checkpoint takes the place of no "
                "better one",
            )
        return value

    def _weights(self, trainer: Trainer) -> Weights:
        """Return the weights to save; warn if they are not finite."""
        weights = trainer.run.saves.weights()
        if weights.nonfinite:
            self._warn_once(
                trainer,
                f"the weights are not finite: {weights.nonfinite!r} holds NaN or an infinity",
                "Checkpoints with finite weights are kept; only the newest non-finite one is saved "
                "in addition. Trainer(detect_anomaly=True) finds where NaN begins",
            )
        return weights

    def _warn_once(self, trainer: Trainer, what: str, follows: str) -> None:
        """Warn on rank 0, once per fit for each `follows`."""
        if trainer.is_global_zero and follows not in self._warned:
            self._warned.add(follows)
            warnings.warn(f"step {trainer.global_step}: {what}. {follows}", stacklevel=2)

    def save_to_resume_from(self, trainer: Trainer, why: str) -> str:
        """Save the whole state as `<why>-step=<n>.ckpt`; return the path.

        The file is kept until another checkpoint is saved. Called on every rank.
        """
        assert self._folder is not None
        name = self._name_to_resume_from(trainer, why)
        path = self._names.choose(trainer.ranks, self._folder, name)
        if not self.save_weights_only:
            self._policy.add_to_resume_from(path)
        weights = self._weights(trainer)
        trainer.run.saves.save(paths.to_location(path), weights_only=False, weights=weights)
        self._names.release()
        return path

    def _name_to_resume_from(self, trainer: Trainer, why: str) -> str:
        return f"{why}-step={trainer.global_step}"

    def format_checkpoint_name(self, trainer: Trainer) -> str:
        """Return the file name for the current values, without `.ckpt`."""
        return self._name(trainer)

    def _name(self, trainer: Trainer) -> str:
        return self._filled(self.filename, trainer)

    def _name_of_last(self, trainer: Trainer) -> str:
        return "last"

    def _filled(self, filename: str, trainer: Trainer) -> str:
        values: dict[str, Any] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        values["epoch"] = trainer.current_epoch
        values["step"] = trainer.global_step
        return self._with_values(filename, values | self._awaited(filename, values, trainer))

    def _awaited(
        self, filename: str, values: Mapping[str, Any], trainer: Trainer
    ) -> dict[str, Any]:
        """Return "none" for the values in a file name that are not logged yet, but may come."""
        pending = trainer.run.monitor.is_pending
        absent = [name for name in names_in(filename) if name not in values and pending(name)]
        for name in absent:
            self._warn_once(
                trainer,
                f"ModelCheckpoint(filename={filename!r}): {name!r} was not logged yet",
                f"Names of checkpoints have 'none' until {name!r} is logged",
            )
        return dict.fromkeys(absent, NotYet())

    def _with_values(self, filename: str, values: Mapping[str, Any]) -> str:
        return filled(filename, values, with_names=self.auto_insert_metric_name)

    # -- its state in a checkpoint

    @property
    def state_key(self) -> str:
        """The key of the state, made of the arguments; distinguishes a run's ModelCheckpoints."""
        return self._key

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Find the state of a callback that saved to a folder of another name, if unambiguous."""
        states = checkpoint.get("callbacks", {})
        alike = [key for key in states if key.startswith(self._key_before_folder)]
        if self.state_key not in states and len(alike) == 1:
            states[self.state_key] = states[alike[0]]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the kept checkpoints, relative to the folder."""
        folder, last = self._folder, self.last_model_path
        if folder is None:
            return {}
        return {
            "dirpath": str(paths.absolute(folder)),
            "last_model_path": paths.relative(last, folder) if last else "",
            "last_step_saved": self._last_step_saved,
            "waits": self._waits,
            **self._policy.state_dict(folder),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the kept checkpoints, by their names in this callback's folder.

        `on_fit_start` checks which of them exist. The state may be from an untrusted checkpoint, so
        it cannot name another folder or files outside this folder.
        """
        folder = self._folder
        if "last_step_saved" in state:
            self._resumed_save = (int(state["last_step_saved"]), bool(state.get("waits")))
        self._restore(state, lambda name: None if folder is None else in_folder(folder, name))

    def load_remote_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a run in other processes, in that run's folder."""
        folder = state["dirpath"]
        self._restore(state, lambda name: str(paths.join(folder, str(name))) if name else None)

    def _restore(self, state: dict[str, Any], locate: Callable[[object], str | None]) -> None:
        self._resumed = state
        self._policy.load_state_dict(state, locate)
        self.last_model_path = locate(state.get("last_model_path")) or ""

    def _forget_missing_files(self, trainer: Trainer) -> None:
        """After resuming, forget checkpoints that no longer exist on rank 0."""
        state, self._resumed = self._resumed, None
        if state is None or self._folder is None:
            return
        if trainer.is_global_zero:
            run = trainer.run
            point = run.resume_point
            resumed = ResumedCheckpoints(self._folder, point.path, point.run_id)
            self._policy.load_state_dict(state, resumed.locate)
            self.last_model_path = resumed.locate_last(state.get("last_model_path"))
            # The user may run the same command again, so keep the checkpoint that it names.
            named = run.job.ckpt_path
            self._protected = resumed.protected
            if named not in (None, "best", "last"):
                self._protected |= {path for path in self.kept_paths if leads_to(named, path)}
            resumed.warn_of_refused()
        policy = self._policy
        found = [policy.best, policy.latest, policy.nonfinite, self.last_model_path]
        found = trainer.ranks.broadcast(found)
        policy.best, policy.latest, policy.nonfinite, self.last_model_path = found
