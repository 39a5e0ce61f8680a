"""ModelCheckpoint: with the arguments, in the order that Lightning's has them."""

# Without the __future__ import: command lines read the types of the arguments as they stand here.

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from stratagem import callbacks
from stratagem.callbacks import filled
from stratagem.checkpoint import SUFFIX
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn
from stratagem_lightning.api.instance_check import second_name
from stratagem_lightning.api.utilities.phrases import in_lightnings_words

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Stratagem's; after an error, it saves under `filename`, and `dirpath` is a string.

    `CHECKPOINT_NAME_LAST`, which may have values in braces as `filename` has them, and
    `CHECKPOINT_EQUALS_CHAR` are looked at at each save; `CHECKPOINT_JOIN_CHAR` stands in
    `format_checkpoint_name` before a version and after a prefix.

    Args:
        dirpath: as in `stratagem.callbacks.ModelCheckpoint`.
        filename: as there.
        monitor: as there.
        verbose: as there.
        save_last: as there.
        save_top_k: as there.
        save_on_exception: as there.
        save_weights_only: as there.
        mode: as there.
        auto_insert_metric_name: as there.
        every_n_train_steps: as there.
        train_time_interval: as there.
        every_n_epochs: as there.
        save_on_train_epoch_end: as there.
        enable_version_counter: as there.

    Raises:
        ConfigurationError: a value out of range; when a fit begins, another `FILE_EXTENSION`.

    Example:
        >>> from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
        >>> saver = ModelCheckpoint(filename="{epoch}-{val_loss:.2f}", monitor="val_loss")
        >>> saver.format_checkpoint_name({"epoch": 2, "val_loss": 0.123456})
        'epoch=2-val_loss=0.12.ckpt'
    """

    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_JOIN_CHAR = "-"
    FILE_EXTENSION = SUFFIX
    _set_path = ""

    @in_lightnings_words
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        self._last_checkpoint_saved = ""
        self._step_of_file = -1
        self._copies_last = save_last is True
        self._keeps_last_only = bool(save_last) and save_top_k == 0
        """Whether the only file is that of the last checkpoint: no other one is linked to."""
        super().__init__(
            dirpath or None,
            filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last and not self._keeps_last_only,
            keep_latest_k=int(self._keeps_last_only),
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
        )

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint, as Lightning has it."""
        arguments = {
            "monitor": self.monitor,
            "mode": self.mode,
            "every_n_train_steps": self.every_n_train_steps or 0,
            "every_n_epochs": self.every_n_epochs or 0,
            "train_time_interval": self.train_time_interval,
        }
        return f"{type(self).__qualname__}{arguments!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the values and the paths that scripts read."""
        own = super().state_dict()
        return own and {
            **own,
            "monitor": self.monitor,
            "best_model_path": super().best_model_path,
            "best_model_score": self.best_model_score,
            "current_score": self.current_score,
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
        }

    def on_load_checkpoint(
        self, trainer: "Trainer", module: "Module", checkpoint: dict[str, Any]
    ) -> None:
        """Find the state; warn of missing ModelCheckpoints."""
        super().on_load_checkpoint(trainer, module, checkpoint)
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        if savers[0] is not self or trainer.run.stage != "fit":
            return
        own, begin = {one.state_key for one in savers}, "ModelCheckpoint{"
        states = checkpoint.get("callbacks", {})
        missing = [key for key in states if key.startswith(begin) and key not in own]
        if missing:
            rank_zero_warn(
                "The checkpoint has the state of callbacks that this Trainer does not have. Please "
                f"add the following callbacks: {missing}, to go on with what they have kept"
            )

    @property
    def dirpath(self) -> str | None:
        """The folder of the checkpoints, absolute if local.

        None: not known before a run.
        """
        folder = self._folder
        return str(folder.absolute() if isinstance(folder, Path) else folder) if folder else None

    @dirpath.setter
    def dirpath(self, folder: str | Path | None) -> None:
        callbacks.ModelCheckpoint.dirpath.fset(self, folder)  # type: ignore[attr-defined]

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, or "". Scripts set another one, until the next save."""
        return self._set_path or super().best_model_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._set_path = str(path)

    @property
    def best_model_score(self) -> Any:
        """The value of the best checkpoint, a tensor.

        None: no checkpoint has a value.
        """
        return _tensor(super().best_model_score)

    @property
    def current_score(self) -> Any:
        """The value that was examined last, a tensor.

        None: no value was examined.
        """
        return _tensor(self._current_score)

    @current_score.setter
    def current_score(self, score: float | None) -> None:
        self._current_score = score

    @property
    def kth_value(self) -> Any:
        """The value of `kth_best_model_path`, a tensor.

        None: no checkpoint has a value.
        """
        return _tensor(self.best_k_models.get(self.kth_best_model_path))

    @property
    def best_k_models(self) -> dict[str, float]:
        """The value of each checkpoint that is kept as the best, by path; {} without a monitor."""
        return super().best_k_models if self.monitor is not None else {}

    @property
    def kth_best_model_path(self) -> str:
        """The worst of them, or ""."""
        return super().kth_best_model_path if self.monitor is not None else ""

    def format_checkpoint_name(  # type: ignore[override]
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path for values.

        Args:
            metrics: values by name; missing values are 0.
            filename: the pattern of the file name; None for the pattern of this callback.
            ver: a version number to append to the name.
            prefix: a prefix of the name.
        """
        name = filename or self.filename
        text = self._with_values(name, _Zeros(metrics))
        text = self.CHECKPOINT_JOIN_CHAR.join(
            [*([prefix] if prefix else []), text, *([] if ver is None else [f"v{ver}"])]
        )
        return str(Path(self.dirpath or "") / f"{text}.ckpt")

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the best checkpoints' values by path.

        Args:
            filepath: None: `best_k_models.yaml` in the folder.
        """
        # JSON is YAML.
        text = json.dumps(self.best_k_models, indent=2)
        Path(filepath or Path(self.dirpath or "") / "best_k_models.yaml").write_text(text + "\n")

    def setup(self, trainer: "Trainer", module: "Module", stage: str) -> None:
        """Choose the folder; refuse an ending by which nothing is found again."""
        if self.FILE_EXTENSION != SUFFIX:
            raise ConfigurationError(
                f"{type(self).__name__}.FILE_EXTENSION is {self.FILE_EXTENSION!r}: expected "
                f"{SUFFIX!r}, by which checkpoints are found again; put what tells them apart into "
                "filename"
            )
        super().setup(trainer, module, stage)
        if isinstance(self._folder, Path):
            self._folder = self._folder.absolute()  # so are the paths of checkpoints

    _last_global_step_saved = second_name("_last_step_saved")
    _save_on_train_epoch_end = second_name("save_on_train_epoch_end")
    _every_n_train_steps = second_name("every_n_train_steps", 0)
    _every_n_epochs = second_name("every_n_epochs", 0)
    _train_time_interval = second_name("train_time_interval")

    def _should_skip_saving_checkpoint(self, trainer: "Trainer") -> bool:
        """Whether nothing is to be saved now; libraries override it."""
        return bool(trainer.options.fast_dev_run) or trainer.state.fn != "fit"

    def _should_save_on_train_epoch_end(self, trainer: "Trainer") -> bool:
        """Whether to save after the training epoch, not after validation; libraries override it."""
        return super()._after_training_epoch(trainer)

    def _after_training_epoch(self, trainer: "Trainer") -> bool:
        return self._should_save_on_train_epoch_end(trainer)

    def on_validation_end(self, trainer: "Trainer", module: "Module") -> None:
        """Save after validation; also of a run that only validates, if a subclass asks for it."""
        super().on_validation_end(trainer, module)
        if trainer.state.fn == "validate" and not self._after_training_epoch(trainer):
            self._save(trainer)

    def _save(self, trainer: "Trainer", *, among_best: bool = True) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        if not any(map(_is_users, self._methods_of_best_and_last)):
            super()._save(trainer, among_best=among_best)
            return
        candidates = self._monitor_candidates(trainer)
        if among_best:
            self._save_topk_checkpoint(trainer, candidates)
        follows_steps = bool(self.every_n_train_steps or self.train_time_interval)
        if follows_steps or not among_best or self._step_of_file == trainer.global_step:
            self._save_last_checkpoint(trainer, candidates)

    @property
    def _methods_of_best_and_last(self) -> tuple[Any, ...]:
        return (
            self._save_topk_checkpoint,
            self._save_monitor_checkpoint,
            self._save_none_monitor_checkpoint,
            self._save_last_checkpoint,
        )

    def _save_topk_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint if its value is among the best; libraries override this to skip some.

        Args:
            trainer: the Trainer.
            monitor_candidates: all values, with `epoch` and `step`.
        """
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
        else:
            self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _save_monitor_checkpoint(
        self, trainer: "Trainer", monitor_candidates: dict[str, Any]
    ) -> None:
        """Save one of the best by the monitored value; libraries override and call it."""
        self._save_best(trainer)

    def _save_none_monitor_checkpoint(
        self, trainer: "Trainer", monitor_candidates: dict[str, Any]
    ) -> None:
        """Save the newest, where nothing is monitored; libraries override and call it."""
        self._save_best(trainer)

    def _save_best(self, trainer: "Trainer") -> None:
        """Save without the last checkpoint, which has a method of its own."""
        last, self.save_last = self.save_last, False
        try:
            super()._save(trainer)
        finally:
            self.save_last = last

    def _save_last_checkpoint(self, trainer: "Trainer", monitor_candidates: dict[str, Any]) -> None:
        """Save or link the last checkpoint, if `save_last`; libraries override it.

        Args:
            trainer: the Trainer.
            monitor_candidates: all values, with `epoch` and `step`.
        """
        weights = self._weights(trainer)
        if not self.save_last or weights.nonfinite:
            return
        assert self._folder is not None
        ranks, former, name = trainer.ranks, self.last_model_path, self._name_of_last(trainer)
        is_own = bool(former) and self._names.may_move(ranks, former)
        stem = Path(former).stem
        if not (is_own and (stem == name or stem.startswith(f"{name}-v"))):
            self.last_model_path = self._names.choose(ranks, self._folder, name)
        target, last = self._last_checkpoint_saved, self.last_model_path
        is_new = self._step_of_file == trainer.global_step and target != last
        if not (is_new and self._link_file(trainer, target, last)):
            self._save_file(trainer, last, weights)
        if is_own and former != last and former not in self._protected:
            self._remove_file(trainer, former)
        self._names.release()

    def on_train_end(self, trainer: "Trainer", module: "Module") -> None:
        """Save the checkpoint of `save_last` if no other save came due."""
        if self.save_last and trainer.global_step and not self.kept_paths:
            self._save(trainer, among_best=False)
        # No `super()`: an error in `on_fit_end` saves too.

    def _name(self, trainer: "Trainer") -> str:
        return self._name_of_last(trainer) if self._keeps_last_only else super()._name(trainer)

    def _write(self, trainer: "Trainer", value: float | None) -> None:
        self._set_path = ""
        self._write_ranked(trainer, value)
        if self._keeps_last_only:
            self.last_model_path = self.kept_paths[-1]

    def _write_ranked(self, trainer: "Trainer", value: float | None) -> None:
        if self.monitor is None or value is None:
            super()._write(trainer, value)
            return
        current = torch.tensor(value, dtype=torch.float64)  # as exact as it was
        self._update_best_and_save(current, trainer, self._monitor_candidates(trainer))

    def _monitor_candidates(self, trainer: "Trainer") -> dict[str, Any]:
        """Return the values for `monitor` and for file names; libraries override it to add some."""
        values = dict(trainer.callback_metrics)
        values["epoch"] = torch.tensor(trainer.current_epoch)
        values["step"] = torch.tensor(trainer.global_step)
        return values

    def _monitored(self, trainer: "Trainer") -> float | None:
        name = self.monitor
        if name is not None and name not in trainer.callback_metrics:
            added = self._monitor_candidates(trainer).get(name)
            if added is not None:
                self._current_score = float(added)
                return self._current_score
        return super()._monitored(trainer)

    def _filled(self, filename: str, trainer: "Trainer") -> str:
        values = self._monitor_candidates(trainer)
        return self._with_values(filename, {name: value.item() for name, value in values.items()})

    # -- files

    def _save_file(self, trainer: "Trainer", path: str, weights: Any) -> None:
        if _is_users(self._save_checkpoint) or _is_users(trainer.save_checkpoint):
            self._save_checkpoint(trainer, path)
        else:
            # Does the same, with weights that are collected already.
            super()._save_file(trainer, path, weights)
        self._last_checkpoint_saved = path
        self._step_of_file = trainer.global_step

    def _save_checkpoint(self, trainer: "Trainer", filepath: str) -> None:
        """Save a checkpoint, on every rank; libraries override it to save something more."""
        trainer.save_checkpoint(filepath, self.save_weights_only)

    def _link_file(self, trainer: "Trainer", target: str, path: str) -> bool:
        # An override saves `last.ckpt` as well, as in Lightning.
        saves_again = self._copies_last and _is_users(self._save_checkpoint)
        return not saves_again and super()._link_file(trainer, target, path)

    def _remove_file(self, trainer: "Trainer", path: str) -> None:
        self._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: "Trainer", filepath: str) -> None:
        """Remove a checkpoint, on rank 0; called on every rank. Libraries override it."""
        super()._remove_file(trainer, filepath)

    def _update_best_and_save(
        self, current: Tensor, trainer: "Trainer", monitor_candidates: dict[str, Any]
    ) -> None:
        """Save a best checkpoint; libraries override this to save further files.

        Args:
            current: the monitored value.
            trainer: the Trainer.
            monitor_candidates: all values, with `epoch` and `step`.
        """
        super()._write(trainer, float(current))

    def _name_of_last(self, trainer: "Trainer") -> str:
        return self._filled(self.CHECKPOINT_NAME_LAST, trainer)

    def _with_values(self, filename: str, values: Mapping[str, Any]) -> str:
        known = _Zeros(values)
        text = filled(
            filename,
            known,
            with_names=self.auto_insert_metric_name,
            equals=self.CHECKPOINT_EQUALS_CHAR,
        )
        # `format_checkpoint_name` passes zeros on purpose.
        for name in set() if isinstance(values, _Zeros) else known.missing - self._warned:
            self._warned.add(name)
            rank_zero_warn(
                f"ModelCheckpoint(filename={filename!r}) uses {name!r}, which was not logged: the "
                f"name has 0 in its place. There is {', '.join(values)}"
            )
        return text

    def _awaited(
        self, filename: str, values: Mapping[str, Any], trainer: "Trainer"
    ) -> dict[str, Any]:
        """Return no values: 0 stands for each that was not logged, as in Lightning."""
        return {}

    def _name_to_resume_from(self, trainer: "Trainer", why: str) -> str:
        if why == "exception":
            return self._name(trainer)
        return super()._name_to_resume_from(trainer, why)


def _is_users(method: Any) -> bool:
    """Whether a method is neither Stratagem's nor wrapped by it."""
    return not str(getattr(method, "__module__", "")).startswith("stratagem")


def _tensor(score: float | None) -> Tensor | None:
    return None if score is None else torch.tensor(score)


class _Zeros(dict[str, Any]):
    """0 for every name that it has not; notes which were looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.missing: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        self.missing.add(name)
        return 0
