"""EarlyStopping: ends training when a value stops improving."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer


class EarlyStopping(Callback):
    """Ends training when a value has not improved for a while.

    The value is the same on every rank, since epoch values are reduced over ranks; so all ranks
    stop at the same epoch. A fit that resumes a run which was ended by this callback trains no
    step, unless the arguments now allow more. Every other fit begins anew. Before `min_epochs` and
    `min_steps` of the Trainer each check decides anew, so a value that recovers trains on.

    Args:
        monitor: the name of the logged value.
        min_delta: only a change that is larger counts as an improvement.
        patience: the number of checks without improvement that end training.
        verbose: whether to print improvements on rank 0.
        mode: "min" if smaller values are better, or "max".
        strict: whether a value that was not logged is an error. If False, the check is skipped.
        check_finite: whether NaN or infinity ends training. If False, they count as no improvement.
        stopping_threshold: end training once the value is better than this.
        divergence_threshold: end training once the value is worse than this.
        check_on_train_epoch_end: whether to check at the end of each training epoch (True) or after
            each validation (False). With None, check when the value is complete.

    Attributes:
        stopped_by: the reason that ended training: "patience_exhausted", "stopping_threshold",
            "divergence_threshold" or "non_finite_metric"; "" if training was not stopped.
        stopping_reason_message: the same reason in words, or None.
        ended_with: the value that ended training, or None.

    Example:
        >>> from stratagem.callbacks import EarlyStopping
        >>> EarlyStopping("val_acc", mode="max", patience=5).state_key
        'EarlyStopping(val_acc, max)'
    """

    runs_after_metrics = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"EarlyStopping(mode={mode!r}): expected 'min' or 'max'")
        if math.isnan(min_delta):
            raise ConfigurationError(
                "EarlyStopping(min_delta=nan): expected a number; no change would count"
            )
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = math.inf if mode == "min" else -math.inf
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopped_by = ""
        self.stopping_reason_message: str | None = None
        self.ended_with: float | None = None
        self._at_first = EarlyStopping.state_dict(self)

    @property
    def stopping_reason(self) -> Any:
        """The reason that ended training, in words, or ""."""
        return self.stopping_reason_message or ""

    @property
    def state_key(self) -> str:
        """The key of the state, made of the value and the mode; unique for each EarlyStopping."""
        return f"EarlyStopping({self.monitor}, {self.mode})"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of checks since then."""
        names = ("best_score", "wait_count", "stopped_epoch", "ended_with")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value and the number of checks since then."""
        self.best_score = state["best_score"]
        self.wait_count = state["wait_count"]
        self.stopped_epoch = state["stopped_epoch"]
        ended_with = state.get("ended_with")
        self.ended_with = None if ended_with is None else float(ended_with)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Begin anew; a fit that resumes loads a state afterwards."""
        if stage == "fit":
            EarlyStopping.load_state_dict(self, self._at_first)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """End a resumed run again, if its last value still does so by the present arguments."""
        self.stopped_by, self.stopping_reason_message = "", None
        if self.ended_with is not None:
            # The value is judged again, which counts it again.
            waited, self.wait_count = self.wait_count, self.wait_count - 1
            kind, reason = self.judge(self.ended_with)
            if kind:
                self.wait_count = waited
                self._stop(trainer, kind, reason)
                why = f"stratagem: {self.stopping_reason_message}. This ended the resumed run"
                if trainer.run.limits.may_stop(trainer.run.state):
                    trainer.print(f"{why}, and ends this one: to train on, change the arguments")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Check the value, if validation runs within epochs."""
        at_epoch_end = self.check_on_train_epoch_end
        if at_epoch_end is None:
            at_epoch_end = not trainer.run.validation.runs_within_epochs
        if trainer.run.stage == "fit" and not trainer.sanity_checking and not at_epoch_end:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Check the value, if the epoch's values are complete only now."""
        at_epoch_end, run = self.check_on_train_epoch_end, trainer.run
        if at_epoch_end is None:
            is_complete = run.state.validated > 0 and not run.validation.runs_within_epochs
            at_epoch_end = is_complete or not run.validation.loaders
        if at_epoch_end:
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if not self.strict and self.monitor not in trainer.callback_metrics:
            return
        score = float(trainer.run.monitor.mean_over_ranks(self.monitor, "EarlyStopping"))
        best = self.best_score
        kind, reason = self.judge(score)
        if kind == "non_finite_metric" and trainer.is_global_zero:
            warnings.warn(
                f"EarlyStopping ends training after step {trainer.global_step}: "
                f"{self.monitor} is {score}. check_finite=False goes on",
                stacklevel=2,
            )
        if self.verbose and self.best_score != best:
            improved = f"improved from {best:.4g} to" if math.isfinite(best) else "is"
            trainer.print(f"stratagem: EarlyStopping: {self.monitor} {improved} {score:.4g}")
        self.ended_with = score if kind else None
        self.stopped_epoch = trainer.current_epoch if kind else 0
        self._stop(trainer, kind, reason)

    def judge(self, score: float) -> tuple[str, str]:
        """Check a value; return the reason to end training as (kind, text), or ("", "")."""
        if self.check_finite and not math.isfinite(score):
            return "non_finite_metric", f"{self.monitor} is {score}"
        sign = 1.0 if self.mode == "min" else -1.0
        ended = "", ""
        for kind, factor in (("stopping_threshold", sign), ("divergence_threshold", -sign)):
            limit, what = getattr(self, kind), kind.replace("_", " ").capitalize()
            if limit is not None and factor * score < factor * limit:
                ended = kind, f"{what} reached: {self.monitor} is {score:.4g}, beyond {limit:g}"
        if sign * score < sign * self.best_score - self.min_delta:
            self.best_score = score
            self.wait_count = 0
            return ended
        self.wait_count += 1
        if self.wait_count >= self.patience and not ended[0]:
            best = f"{self.monitor} did not improve on {self.best_score:.4g}"
            return "patience_exhausted", f"{best} (patience={self.patience})"
        return ended

    def _stop(self, trainer: Trainer, kind: str, reason: str) -> None:
        """End training, or take an earlier request back if there is no reason any more."""
        self.stopped_by = kind
        self.stopping_reason_message = f"EarlyStopping: {reason}" if kind else None
        trainer.run.request_stop(self, wanted=bool(kind))
