"""EarlyStopping: with its reason as an enumeration, as Lightning has it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from stratagem import callbacks
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class EarlyStoppingReason(IntEnum):
    """The reason why training ended."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(callbacks.EarlyStopping):
    """Stratagem's, with its reason as an `EarlyStoppingReason`.

    Args:
        *args, **options: the arguments of `stratagem.callbacks.EarlyStopping`.
        log_rank_zero_only: ignored: only rank 0 prints messages.

    Example:
        >>> from stratagem_lightning.api.callbacks.early_stopping import EarlyStopping
        >>> EarlyStopping("val_loss").stopping_reason.name
        'NOT_STOPPED'
    """

    @in_lightnings_words
    def __init__(self, *args: Any, log_rank_zero_only: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint, as Lightning has it."""
        return f"{type(self).__qualname__}{{'monitor': {self.monitor!r}, 'mode': {self.mode!r}}}"

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Find the state under the key of Stratagem's own EarlyStopping."""
        states = checkpoint.get("callbacks", {})
        if (own := super().state_key) in states:
            states.setdefault(self.state_key, states.pop(own))

    @property
    def best_score(self) -> Any:
        """The best value so far, of shape ()."""
        return torch.tensor(self._best_score, dtype=torch.float64)

    @best_score.setter
    def best_score(self, score: Any) -> None:
        self._best_score = float(score)

    @property
    def stopping_reason(self) -> EarlyStoppingReason:
        """The reason why training ended; `stopping_reason_message` has it in words."""
        return EarlyStoppingReason[(self.stopped_by or "not_stopped").upper()]

    @stopping_reason.setter
    def stopping_reason(self, reason: EarlyStoppingReason) -> None:
        self.stopped_by = "" if not reason else reason.name.lower()

    def _check(self, trainer: Any) -> None:
        """Look at the value, by a method that libraries override."""
        self._run_early_stopping_check(trainer)

    def _run_early_stopping_check(self, trainer: Any) -> None:
        """Look at the value, but not in a quick run, which may not log it."""
        if not trainer.options.fast_dev_run:
            super()._check(trainer)

    def judge(self, score: float) -> tuple[str, str]:
        """Decide by `_evaluate_stopping_criteria`, which libraries override."""
        self._kind = ""
        ends, reason = self._evaluate_stopping_criteria(torch.tensor(score, dtype=torch.float64))
        return (self._kind or "patience_exhausted", reason or "") if ends else ("", "")

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Take a value of shape () into account; return whether training ends, and why."""
        self._kind, reason = super().judge(float(current))
        return bool(self._kind), reason or None

    def state_dict(self) -> dict[str, Any]:
        """Return the reason too."""
        reason = {"stopped_by": self.stopped_by, "message": self.stopping_reason_message}
        return {**super().state_dict(), "best_score": self._best_score, "reason": reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        super().load_state_dict(state)
        reason = state.get("reason", {})
        self.stopped_by = reason.get("stopped_by", "")
        self.stopping_reason_message = reason.get("message")
