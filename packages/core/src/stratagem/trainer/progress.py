"""The progress of training and evaluation, and the state of the Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """The progress of training, which is a part of checkpoints.

    Attributes:
        epoch: the current epoch, counted from 0.
        global_step: the number of optimizer steps taken.
        batches: the number of finished batches in this epoch, on each rank.
        epoch_is_done: whether all batches of this epoch are finished, so that only the end of the
            epoch is left.
        validated: the value of `batches` at the last validation in this epoch; 0: no validation
            yet.
        batches_before: the number of batches in all previous epochs.
        last_step: the number of batches in the last optimizer step; 0 if it is unknown.
        end_begun: whether the hooks of this epoch's end have begun.
        stop_delayed: whether `Trainer.should_stop` was set before the minimum of training.
    """

    epoch: int = 0
    global_step: int = 0
    batches: int = 0
    epoch_is_done: bool = False
    validated: int = 0
    batches_before: int = 0
    last_step: int = 0
    end_begun: bool = False
    stop_delayed: bool = False

    @property
    def logged_step(self) -> int:
        """The step of logged values: the index of the last optimizer step; 0 before the first."""
        return max(0, self.global_step - 1)

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.batches_before += self.batches
        self.batches = 0
        self.epoch_is_done = self.end_begun = False
        self.validated = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields; if the end of the epoch had begun, go to the next epoch."""
        # Older checkpoints lack some.
        complete = {**asdict(Progress()), "end_begun": state["epoch_is_done"], **state}
        for name in vars(self):
            setattr(self, name, complete[name])
        if self.epoch_is_done and self.end_begun:
            self.next_epoch()


@dataclass
class EvaluationProgress:
    """The progress of validation, testing or predicting in a run.

    Attributes:
        what: the current evaluation: "validation", "test" or "predict"; "" between evaluations.
        batches: the number of batches in this run so far, used as the step of logged values.
        predictions: the results of `predict_step` so far, a list for each loader, if they are kept.
    """

    what: str = ""
    batches: int = 0
    predictions: Sequence[list[Any]] = ()


@dataclass
class RunState:
    """The state of a Trainer.

    Attributes:
        stage: "fit", "validate", "test", "predict", or "" between runs.
        status: "running", "finished" or "interrupted".
        fn: "fit", "validate", "test" or "predict": the current or last run. None: no run yet.
    """

    stage: str = ""
    status: str = "finished"
    fn: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last run ended without an exception."""
        return self.status == "finished"
