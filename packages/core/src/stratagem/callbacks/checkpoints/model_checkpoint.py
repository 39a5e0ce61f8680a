"""ModelCheckpoint: saves checkpoints while a model trains, and removes those not to be kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.callbacks.checkpoints.names import CheckpointNames, filled, is_version_of
from stratagem.callbacks.checkpoints.resumed import ResumedCheckpoints, in_folder, leads_to
from stratagem.callbacks.checkpoints.retention import RetentionPolicy
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer
    from stratagem.trainer.resume.checkpoint import Weights


class ModelCheckpoint(Callback):
    """Saves checkpoints while a model trains.

    What calls for a save (steps, epochs, time) may be combined. Only files of this run, or of the
    run that it resumes, are ever removed or replaced: where another run has saved under a name, or
    is about to, this one adds `-v1`, `-v2` and so on. So does a resumed run, where the run that was
    interrupted has saved under a name after the checkpoint that is resumed. What a fit's
    `ckpt_path` has named is kept, so that the same command finds it again; what it found as "last"
    goes as others do.

    Args:
        dirpath: where to, a local path or a URL ("s3://bucket/run"); None: a folder `checkpoints`
            beside the logs.
        filename: name without `.ckpt`, with values in braces: "{epoch}-{val_acc:.3f}"; None:
            "epoch=E-step=S".
        auto_insert_metric_name: write each value's name before it, "epoch=3"; False: the value.
        enable_version_counter: False: replace what has a name already, another run's too.
        verbose: say on rank 0 what was saved.
        monitor: logged value that says which are the best, or "epoch" or "step"; None: the newest
            are.
        mode: "min": smaller is better; "max".
        save_top_k: how many of the best to keep (without `monitor`: of the newest); -1: all; 0:
            none.
        keep_latest_k: how many of the newest to keep as well, whatever their values.
        save_last: let `last.ckpt` name the newest, which is then kept: as a symbolic link, on an
            object store as a copy. It moves once the newest is durable. "link" means the same.
        save_weights_only: leave optimizer and loop state out.
        every_n_train_steps: save after every so many optimizer steps; 0: not by steps.
        every_n_epochs: save after every so many epochs, 0: not by epochs; the default is 1, unless
            steps or time are given.
        train_time_interval: save when so much time has gone by since the last save. With several
            ranks half a second may be added: they agree on the time about twice a second.
        save_on_train_epoch_end: save at the end of the training epoch (True), where the values of
            training and of validation are there, or after validation (False), in a fit that has
            one; None: after validation if it comes in the middle of epochs.
        save_on_exception: save as `exception-step=S.ckpt` when training ends by an error or by
            Ctrl-C. Only where one process trains: of several, the others are elsewhere.

    If weights are not finite, a warning says so once. Of such checkpoints only the newest is kept,
    in addition to the finite ones: it counts among neither the best nor the newest, and `last.ckpt`
    stays. A monitored value that is NaN is the worst.

    With `monitor`, an epoch without validation is passed over where others have it. What calls for
    a save by steps or time waits for the validation that comes next, if that is before the next
    batch, or if there is no value yet, which is said once. A signal that
    ends training saves `interrupted-step=S.ckpt`. That file, and the one of an error, stay until
    this run, resumed, has saved another.

    Attributes:
        best_model_path: the best so far, or "".
        best_model_score: its value, or None.
        best_k_models: value by path of those that are kept for it.
        kth_best_model_path: the worst of them, or "".
        current_score: the value that was looked at last, or None.
        last_model_path: this run's `last.ckpt`, or "".

    Raises:
        ConfigurationError: a value out of range.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}")
        >>> Trainer(callbacks=best, logger=False).checkpoint_callback is best
        True

        The three best, and the two newest to resume from, every 1000 steps and every half hour:

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
        self.current_score: float | None = None
        self.last_model_path = ""
        arguments = {
            "monitor": monitor,
            "mode": mode,
            "filename": self.filename,
            "save_top_k": save_top_k,
            "keep_latest_k": keep_latest_k,
            "save_weights_only": save_weights_only,
            "every_n_train_steps": every_n_train_steps,
            "every_n_epochs": self.every_n_epochs,
            "train_time_interval": train_time_interval,
        }
        listed = ", ".join(f"{n}={value}" for n, value in arguments.items() if value is not None)
        self._key_before_folder = f"ModelCheckpoint({listed}, dirpath="
        self._key = f"{self._key_before_folder}{dirpath})"
        # Without a monitor the value is the step: the newest are the best.
        self._kept = RetentionPolicy(
            "max" if monitor is None else mode,
            top_k=save_top_k,
            latest_k=max(keep_latest_k, int(self.save_last)),
        )
        self._names = CheckpointNames(replaces=not enable_version_counter)
        self._resumed: dict[str, Any] | None = None
        """The state that was loaded, until rank 0 has checked which of its files still exist."""
        self._saving: tuple[int, bool] | None = None
        """Of a run that is resumed: the step that was saved last, and whether a save waits."""
        self._spared: set[str] = set()
        """On rank 0: checkpoints of before this run was resumed, which may be another run's."""
        self._warned: set[str] = set()
        """On rank 0: the warnings of this fit."""
        self._trains = False
        self._waits = False
        """Whether a save waits for the monitored value."""
        self._last_step_saved = -1
        self._last_time_saved = 0.0

    def _check_arguments(self) -> None:
        interval: object = self.train_time_interval
        if self.mode not in ("min", "max"):
            raise ConfigurationError(
                f"ModelCheckpoint(mode={self.mode!r}): expected 'min' or 'max'"
            )
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
        """The folder that it saves in, a `pathlib.Path` or a URL; None: not known before a run."""
        return self._folder

    @dirpath.setter
    def dirpath(self, folder: str | Path | paths.Location | None) -> None:
        self._folder = None if folder is None else paths.parse_user_path(folder)

    @property
    def best_k_models(self) -> dict[str, float]:
        """Value by path of those that are kept as the best."""
        return self._kept.best

    @property
    def best_model_path(self) -> str:
        """The best so far, or ""."""
        return self._kept.best_path()

    @property
    def kth_best_model_path(self) -> str:
        """The worst of those that are kept as the best, or ""."""
        return self._kept.worst_path()

    @property
    def best_model_score(self) -> float | None:
        """The value of the best, or None; without a monitor there are no values."""
        return self._kept.best.get(self.best_model_path) if self.monitor is not None else None

    @property
    def kept_paths(self) -> list[str]:
        """All that are kept, for whatever reason."""
        return self._kept.all_paths()

    # -- when to save

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Choose the folder, alike on every rank."""
        if stage == "fit" and not trainer.options.fast_dev_run:
            self.choose_folder(trainer)

    def choose_folder(self, trainer: Trainer) -> None:
        """Choose the folder if none was passed: beside the logs, or at the Trainer's URL."""
        if self._folder is None:
            root = trainer.options.default_root_dir
            root = root if paths.is_url(root) else Path(trainer.log_dir)
            self._folder = paths.join(root, "checkpoints")
        self._folder = paths.to_location(trainer.ranks.broadcast(str(self._folder)))

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Look at what of the checkpoints of a run that is resumed is still there."""
        self._drop_missing(trainer)
        if self.save_on_exception and trainer.world_size > 1 and trainer.is_global_zero:
            warnings.warn(
                f"ModelCheckpoint(save_on_exception=True) saves nothing with {trainer.world_size} "
                "ranks: when one fails, the others are elsewhere. Signals save in any case; "
                "train_time_interval limits what an error costs",
                stacklevel=2,
            )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Start the clock; what was resumed from need not be saved again."""
        self._warned.clear()
        self._trains = not trainer.options.fast_dev_run
        self._last_time_saved = trainer.run.interruption.agreed_time()
        self._last_step_saved, self._waits = self._saving or (trainer.global_step, False)
        self._saving = None

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if enough steps or time have gone by."""
        if trainer.is_within_step:
            return  # what is saved here must be there before an older one is removed
        step = trainer.global_step
        if step == self._last_step_saved:
            return
        every, interval = self.every_n_train_steps, self.train_time_interval
        if (every and step % every == 0) or (
            interval is not None
            and trainer.run.interruption.agreed_time() - self._last_time_saved
            >= interval.total_seconds()
        ):
            # The value of these very weights is about to come.
            self._waits = self._monitors_logged and trainer.run.validates_next
            if not self._waits:
                self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Save after validation, unless it is to happen after the training epoch."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._is_awaited(trainer) or (
            not self._after_training_epoch(trainer) and self._epoch_is_due(trainer)
        ):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Save after the training epoch, unless it is to happen after validation."""
        if self._is_awaited(trainer):
            self._save(trainer)
        elif self._after_training_epoch(trainer) and self._epoch_is_due(trainer):
            # What was monitored may be of an earlier epoch, or not there yet.
            known = trainer.run.has_validated or not trainer.run.has_validation
            self._save(trainer, among_best=known or self.monitor is None)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Note that an error from here on has cost no training."""
        self._trains = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Save where training stands, if that was asked for."""
        if (
            self.save_on_exception
            and self._trains
            and trainer.world_size == 1
            and trainer.global_step != self._last_step_saved
            and not isinstance(exception, (CheckpointError, SystemExit))
        ):
            try:
                self.save_to_resume_from(trainer, "exception")
            except Exception as error:
                # The first error is the one to be seen.
                warnings.warn(f"after {exception!r}, saving failed: {error}", stacklevel=2)
        self._end()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Give names back that were claimed."""
        self._end()

    def _end(self) -> None:
        self._trains = False
        self._names.release_all()

    def _after_training_epoch(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is None:
            return not trainer.run.validates_within_epochs
        return self.save_on_train_epoch_end or not trainer.run.has_validation

    @property
    def _monitors_logged(self) -> bool:
        return self.monitor is not None and self.monitor not in ("epoch", "step")

    def _is_awaited(self, trainer: Trainer) -> bool:
        """Whether a save waits for a value that is there by now; then it waits no more."""
        is_saved = trainer.global_step == self._last_step_saved and self._keeps_latest
        name = self.monitor
        if not self._waits or name is None or is_saved or trainer.run.is_metric_pending(name):
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
        value = self._monitored(trainer) if among_best and self.save_top_k != 0 else None
        if value is not None and not self._kept.is_among_best(value):
            value = None
        if value is not None or self._keeps_latest:
            self._write(trainer, value)

    def _write(self, trainer: Trainer, value: float | None) -> None:
        """Save a checkpoint, one of the best if there is a value; remove what it replaces."""
        assert self._folder is not None
        ranks, last = trainer.ranks, self.last_model_path
        before = self._kept.copy(), last
        weights = self._weights(trainer)
        moves_last = self.save_last and not weights.nonfinite
        # A name that stays the same replaces the checkpoint that would be removed for it.
        own = [] if weights.nonfinite else self._kept.copy().add("", value)
        own = [old for old in own if old not in self._spared]
        path = self._names.choose(ranks, self._folder, self._name(trainer), own)
        former, name = "", self._name_of_last(trainer)
        if moves_last and last and self._names.may_move(ranks, last):
            former = "" if is_version_of(last, name) else last
        else:
            last = ""
        if moves_last and (former or not last):
            last = self.last_model_path = self._names.choose(ranks, self._folder, name)
        # The state first, so that it is in the checkpoint itself.
        if weights.nonfinite:
            dropped = self._kept.add_nonfinite(path)
        else:
            dropped = self._kept.add(path, value)
        save = partial(trainer.run.save, weights_only=self.save_weights_only, weights=weights)
        try:
            save(paths.to_location(path))
        except BaseException:
            self._kept, self.last_model_path = before
            raise
        # `last` moves once its new target is durable, and the old target goes after that.
        if moves_last and not trainer.checkpoint_writer.link(path, last):
            save(paths.to_location(last))
        for old in (former, *dropped) if former else dropped:
            if old not in self._spared:
                trainer.checkpoint_writer.remove(old)
        self._names.release()
        if self.verbose:
            score = f", {self.monitor} {value:.4g}" if self.monitor and value is not None else ""
            trainer.print(f"stratagem: ModelCheckpoint: saved {path}{score}")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                tell = partial(logger.after_save_checkpoint, self)
                trainer.strategy.checkpoint_io.when_durable(tell)

    def _monitored(self, trainer: Trainer) -> float | None:
        """Return the value that the present checkpoint would be kept for; None: not there yet."""
        positions = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        name = "step" if self.monitor is None else self.monitor
        if name in positions and (self.monitor is None or name not in trainer.callback_metrics):
            position = self.current_score = float(positions[name])
            return position
        if trainer.run.is_metric_pending(name):
            self._waits = True
            self._warn_once(
                trainer,
                f"ModelCheckpoint(monitor={name!r}): there is no value yet",
                "What calls for a save before the first one waits for it; keep_latest_k=1 keeps "
                "the newest in any case",
            )
            return None
        value = self.current_score = float(trainer.run.metric(name, "ModelCheckpoint"))
        if math.isnan(value):
            self._warn_once(
                trainer,
                f"ModelCheckpoint(monitor={name!r}): the value is NaN",
                "NaN is the worst value in either mode: such a checkpoint takes the place of no "
                "better one",
            )
        return value

    def _weights(self, trainer: Trainer) -> Weights:
        """Return what is to be saved, and say where it is not finite."""
        weights = trainer.run.weights()
        if weights.nonfinite:
            self._warn_once(
                trainer,
                f"the weights are not finite: {weights.nonfinite!r} holds NaN or an infinity",
                "Checkpoints with finite weights are kept; only the newest non-finite one is saved "
                "in addition. Trainer(detect_anomaly=True) finds where NaN begins",
            )
        return weights

    def _warn_once(self, trainer: Trainer, what: str, follows: str) -> None:
        """Warn on rank 0, once a fit of each thing that comes about."""
        if trainer.is_global_zero and follows not in self._warned:
            self._warned.add(follows)
            warnings.warn(f"step {trainer.global_step}: {what}. {follows}", stacklevel=2)

    def save_to_resume_from(self, trainer: Trainer, why: str) -> str:
        """Save the whole state as `<why>-step=<n>.ckpt`, until there is another; return the path.

        Called on every rank.
        """
        assert self._folder is not None
        name = self._name_to_resume_from(trainer, why)
        path = self._names.choose(trainer.ranks, self._folder, name)
        if not self.save_weights_only:
            self._kept.add_to_resume_from(path)
        trainer.run.save(
            paths.to_location(path), weights_only=False, weights=self._weights(trainer)
        )
        self._names.release()
        return path

    def _name_to_resume_from(self, trainer: Trainer, why: str) -> str:
        return f"{why}-step={trainer.global_step}"

    def format_checkpoint_name(self, trainer: Trainer) -> str:
        """Return the file name for the present values, without `.ckpt`."""
        return self._name(trainer)

    def _name(self, trainer: Trainer) -> str:
        return self._filled(self.filename, trainer)

    def _name_of_last(self, trainer: Trainer) -> str:
        return "last"

    def _filled(self, filename: str, trainer: Trainer) -> str:
        values: dict[str, Any] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        values["epoch"] = trainer.current_epoch
        values["step"] = trainer.global_step
        return self._with_values(filename, values)

    def _with_values(self, filename: str, values: Mapping[str, Any]) -> str:
        return filled(filename, values, with_names=self.auto_insert_metric_name)

    # -- its state in a checkpoint

    @property
    def state_key(self) -> str:
        """Tells it from other ModelCheckpoints of a run by what they were given."""
        return self._key

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Find its state also if its folder has another name by now, where only one can be it."""
        states = checkpoint.get("callbacks", {})
        alike = [key for key in states if key.startswith(self._key_before_folder)]
        if self.state_key not in states and len(alike) == 1:
            states[self.state_key] = states[alike[0]]

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints are kept; names are relative to the folder."""
        if self._folder is None:
            return {}
        return {
            "dirpath": str(paths.absolute(self._folder)),
            "last_model_path": paths.relative(self.last_model_path, self._folder)
            if self.last_model_path
            else "",
            "last_step_saved": self._last_step_saved,
            "waits": self._waits,
            **self._kept.state_dict(self._folder),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore which checkpoints are kept, by their names in this one's folder.

        When a fit goes on, it is looked at which are there. A state may be anybody's, so that it
        names no folder and nothing outside of this one's.
        """
        folder = self._folder
        if "last_step_saved" in state:
            self._saving = (int(state["last_step_saved"]), bool(state.get("waits")))
        self._take(state, lambda name: None if folder is None else in_folder(folder, name))

    def load_remote_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a run in other processes, in whatever folder."""
        folder = state["dirpath"]
        self._take(state, lambda name: str(paths.join(folder, str(name))) if name else None)

    def _take(self, state: dict[str, Any], locate: Callable[[object], str | None]) -> None:
        self._resumed = state
        self._kept.load_state_dict(state, locate)
        self.last_model_path = locate(state.get("last_model_path")) or ""

    def _drop_missing(self, trainer: Trainer) -> None:
        """After resuming, forget checkpoints that no longer exist on rank 0."""
        state, self._resumed = self._resumed, None
        if state is None or self._folder is None:
            return
        if trainer.is_global_zero:
            run = trainer.run
            there = ResumedCheckpoints(self._folder, run.resume_point.path, run.run_id)
            self._kept.load_state_dict(state, there.locate)
            self.last_model_path = there.locate_last(state.get("last_model_path"))
            # The command line that names one may be run again.
            named = run.job.ckpt_path
            self._spared = there.spared
            if named not in (None, "best", "last"):
                self._spared |= {path for path in self.kept_paths if leads_to(named, path)}
            there.warn_of_refused()
        kept = self._kept
        seen = [kept.best, kept.latest, kept.nonfinite, self.last_model_path]
        kept.best, kept.latest, kept.nonfinite, self.last_model_path = trainer.ranks.broadcast(seen)
