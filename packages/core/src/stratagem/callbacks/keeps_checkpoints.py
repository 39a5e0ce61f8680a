"""KeepsCheckpoints: what a ModelCheckpoint says of those that it keeps, and saves of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.callbacks.checkpoints.resumed import ResumedCheckpoints, in_folder, leads_to
from stratagem.callbacks.checkpoints.retention import KeptCheckpoints
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer


class KeepsCheckpoints(Callback):
    """Which checkpoints are kept, in this run and in the one that resumes it.

    The arguments of `ModelCheckpoint`, which decides when to save, tell one from another.
    """

    filename: str
    monitor: str | None
    mode: Literal["min", "max"]
    save_top_k: int
    keep_latest_k: int
    save_weights_only: bool
    every_n_train_steps: int | None
    every_n_epochs: int | None
    train_time_interval: timedelta | None
    last_model_path: str
    current_score: float | None
    _folder: paths.Location | None
    _kept: KeptCheckpoints
    _key: str

    def __init__(self) -> None:
        self.current_score = None
        self._resumed: dict[str, Any] | None = None
        """What was loaded, until rank 0 has looked at what of it is still there."""
        self._spared: set[str] = set()
        """On rank 0: what was saved before this run was resumed, and may be another's."""

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

    # -- its state in a checkpoint

    @property
    def state_key(self) -> str:
        """Tells it from other ModelCheckpoints of a run by what they were given."""
        return self._key

    def _key_without_folder(self) -> str:
        given = {
            "monitor": self.monitor,
            "mode": self.mode,
            "filename": self.filename,
            "save_top_k": self.save_top_k,
            "keep_latest_k": self.keep_latest_k,
            "save_weights_only": self.save_weights_only,
            "every_n_train_steps": self.every_n_train_steps,
            "every_n_epochs": self.every_n_epochs,
            "train_time_interval": self.train_time_interval,
        }
        listed = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"ModelCheckpoint({listed}"

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Find its state also if its folder has another name by now, where only one can be it."""
        states = checkpoint.get("callbacks", {})
        alike = [key for key in states if key.startswith(self._key_without_folder() + ", dirpath=")]
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
            **self._kept.state_dict(self._folder),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore which checkpoints are kept, by their names in this one's folder.

        When a fit goes on, it is looked at which are there. A state may be anybody's, so that it
        names no folder and nothing outside of this one's.
        """
        folder = self._folder
        self._take(state, lambda name: None if folder is None else in_folder(folder, name))

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore what a run in processes of its own has kept, wherever that is."""
        folder = state["dirpath"]
        self._take(state, lambda name: str(paths.join(folder, str(name))) if name else None)

    def _take(self, state: dict[str, Any], locate: Callable[[object], str | None]) -> None:
        self._resumed = state
        self._kept.load_state_dict(state, locate)
        self.last_model_path = locate(state.get("last_model_path")) or ""

    def _look_after_resuming(self, trainer: Trainer) -> None:
        """Forget what is not there any more; what rank 0 sees counts."""
        state, self._resumed = self._resumed, None
        if state is None or self._folder is None:
            return
        if trainer.is_global_zero:
            run = trainer.run
            there = ResumedCheckpoints(self._folder, run.resumed_from, run.run_id)
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
