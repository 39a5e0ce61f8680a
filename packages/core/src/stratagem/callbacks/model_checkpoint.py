"""ModelCheckpoint: saves the best, the last, and every n steps or epochs."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class ModelCheckpoint(Callback):
    """Saves checkpoints while a model trains.

    Args:
        dirpath: where to; None: a folder `checkpoints` beside the logs.
        filename: name without `.ckpt`, with values in braces: "{epoch}-{val_acc:.3f}"; None:
            "epoch=E-step=S".
        monitor: logged value that says which are the best; None: the newest are.
        mode: "min": smaller is better; "max".
        save_top_k: how many of the best to keep; -1: all; 0: none.
        save_last: also keep the newest as `last.ckpt`.
        save_weights_only: leave optimizer and loop state out.
        every_n_train_steps: save after every so many optimizer steps.
        every_n_epochs: save after every so many epochs; the default is 1, unless steps or time are
            given.
        train_time_interval: save when so much time has gone by since the last save.
        save_on_train_epoch_end: save at the end of the training epoch (True), where the values of
            training and of validation are there, or after validation (False); None: after
            validation if it comes in the middle of epochs.

    With `monitor`, an epoch without validation is passed over where others have it.

    Attributes:
        best_model_path: the best so far, or "".
        best_model_score: its value, or None.
        best_k_models: value by path of those that are kept.
        last_model_path: the newest `last.ckpt`, or "".

    Raises:
        ConfigurationError: several triggers at once, or a value out of range.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ModelCheckpoint
        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}")
        >>> Trainer(callbacks=best, logger=False).checkpoint_callback is best
        True
    """

    monitors = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        save_weights_only: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_on_train_epoch_end: bool | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"ModelCheckpoint(mode={mode!r}): expected 'min' or 'max'")
        if save_top_k < -1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={save_top_k!r}): expected a number of checkpoints, or "
                "-1 for all"
            )
        if save_top_k > 1 and monitor is None:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={save_top_k}) needs monitor='...', the logged value "
                "that says which are the best"
            )
        triggers = {
            "every_n_train_steps": every_n_train_steps,
            "every_n_epochs": every_n_epochs,
            "train_time_interval": train_time_interval,
        }
        given = [name for name, value in triggers.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"ModelCheckpoint received {' and '.join(given)}; expected one of them: use a "
                "second ModelCheckpoint for the other"
            )
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = triggers[name]
            if isinstance(value, int) and value < 1:
                raise ConfigurationError(f"ModelCheckpoint({name}={value}): expected at least 1")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.filename = filename or "{epoch}-{step}"
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.save_weights_only = save_weights_only
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs or (None if given else 1)
        self.train_time_interval = train_time_interval
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.best_k_models: dict[str, float] = {}
        self.last_model_path = ""
        self._last_step_saved = -1
        self._last_time_saved = 0.0

    @property
    def state_key(self) -> str:
        """Names the value and the trigger: a run may have several."""
        trigger = self.every_n_train_steps or self.train_time_interval or self.every_n_epochs
        return f"ModelCheckpoint({self.monitor}, {self.mode}, {trigger})"

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints are kept."""
        return {
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "best_k_models": dict(self.best_k_models),
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back which checkpoints are kept; those that are gone by now are forgotten."""
        self.best_k_models = {
            path: score for path, score in state["best_k_models"].items() if Path(path).exists()
        }
        self.best_model_path = state["best_model_path"]
        self.best_model_score = state["best_model_score"]
        self.last_model_path = state["last_model_path"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Choose the folder, alike on every rank."""
        if stage == "fit":
            if self.dirpath is None:
                self.dirpath = Path(trainer.log_dir) / "checkpoints"
            self.dirpath = Path(trainer.strategy.broadcast(str(self.dirpath)))

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Start the clock; what was resumed from need not be saved again."""
        self._last_time_saved = time.monotonic()
        self._last_step_saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if enough steps or time have gone by."""
        if trainer.is_within_step:
            return  # what is saved here must be there before an older one is removed
        step = trainer.global_step
        if self.every_n_train_steps is not None:
            due = step % self.every_n_train_steps == 0
        elif self.train_time_interval is not None:
            elapsed = time.monotonic() - self._last_time_saved
            # Clocks of ranks differ, and all must save together: rank 0's counts.
            due = trainer.strategy.broadcast(elapsed >= self.train_time_interval.total_seconds())
        else:
            return
        if due and step != self._last_step_saved:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Save after validation, unless it is to happen after the training epoch."""
        if trainer.state.stage != "fit" or trainer.sanity_checking:
            return
        if not self._after_training_epoch(trainer) and self._epoch_is_due(trainer):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Save after the training epoch, unless it is to happen after validation."""
        if self._after_training_epoch(trainer) and self._epoch_is_due(trainer):
            # What was monitored may be of an earlier epoch, or not there yet.
            known = trainer.has_validated or not trainer.has_validation
            self._save(trainer, among_best=known or self.monitor is None)

    def _after_training_epoch(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return not trainer.validates_within_epochs

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        if self.every_n_epochs is None or trainer.global_step == self._last_step_saved:
            return False
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _save(self, trainer: Trainer, *, among_best: bool = True) -> None:
        assert self.dirpath is not None
        self._last_step_saved = trainer.global_step
        self._last_time_saved = time.monotonic()
        if self.save_top_k != 0 and among_best:
            self._save_best(trainer)
        if self.save_last:
            path = self.dirpath / "last.ckpt"
            # The path is told to the state first, so that the checkpoint knows of itself.
            self.last_model_path = str(path)
            trainer.save_checkpoint(path, weights_only=self.save_weights_only)

    def _save_best(self, trainer: Trainer) -> None:
        assert self.dirpath is not None
        score = float(trainer.global_step)
        better = _larger
        if self.monitor is not None:
            score = float(trainer.metric(self.monitor, "ModelCheckpoint"))
            better = _smaller if self.mode == "min" else _larger
        keeps_all = self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k
        worst = None
        if not keeps_all:
            worst = _extreme(self.best_k_models, lambda a, b: better(b, a))
            if not better(score, self.best_k_models[worst]):
                return
        path = str(self._new_path(trainer))
        if worst is not None:
            del self.best_k_models[worst]
        self.best_k_models[path] = score
        self.best_model_path = _extreme(self.best_k_models, better)
        self.best_model_score = (
            self.best_k_models[self.best_model_path] if self.monitor is not None else None
        )
        trainer.save_checkpoint(path, weights_only=self.save_weights_only)
        # The old one goes only once the new one is durable.
        if worst is not None and worst != path:
            trainer.strategy.remove_checkpoint(worst)

    def _new_path(self, trainer: Trainer) -> Path:
        """Return a path that no other checkpoint has, alike on every rank."""
        assert self.dirpath is not None
        name = self.format_checkpoint_name(trainer)
        path = self.dirpath / f"{name}.ckpt"
        version = 1
        while trainer.is_global_zero and path.exists() and str(path) not in self.best_k_models:
            path = self.dirpath / f"{name}-v{version}.ckpt"
            version += 1
        return Path(trainer.strategy.broadcast(str(path)))

    def format_checkpoint_name(self, trainer: Trainer) -> str:
        """Return the file name for the present values, without `.ckpt`."""
        values: dict[str, Any] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        values["epoch"] = trainer.current_epoch
        values["step"] = trainer.global_step

        def fill(match: re.Match[str]) -> str:
            name, _, form = match.group(1).partition(":")
            if name not in values:
                raise ConfigurationError(
                    f"ModelCheckpoint(filename={self.filename!r}) uses {name!r}, but there is only "
                    f"{', '.join(sorted(values))}"
                )
            text = format(values[name], form)
            return f"{name.replace('/', '_')}={text}"

        return re.sub(r"\{([^}]+)\}", fill, self.filename)


def _larger(a: float, b: float) -> bool:
    return a > b or (b != b and a == a)


def _smaller(a: float, b: float) -> bool:
    return a < b or (b != b and a == a)


def _extreme(models: dict[str, float], better: Any) -> str:
    """Return the path whose value is better than all others'; NaN is the worst."""
    paths = iter(models)
    best = next(paths)
    for path in paths:
        if better(models[path], models[best]):
            best = path
    return best
