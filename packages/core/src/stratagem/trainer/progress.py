"""How far training and evaluation are, and what the Trainer is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """How far training is; part of a checkpoint.

    Attributes:
        epoch: the present one, counted from 0.
        global_step: optimizer steps taken.
        batches: batches of this epoch that were trained on, on each rank.
        epoch_is_done: all of them were; what is left of the epoch is its end.
        validated: how many of them were when validation ran last in this epoch; 0: it has not.
        batches_before: those of all epochs before.
        last_step: how many batches the last optimizer step had; 0: not known.
        end_begun: the hooks of this epoch's end have begun.
    """

    epoch: int = 0
    global_step: int = 0
    batches: int = 0
    epoch_is_done: bool = False
    validated: int = 0
    batches_before: int = 0
    last_step: int = 0
    end_begun: bool = False

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.batches_before += self.batches
        self.batches = 0
        self.epoch_is_done = self.end_begun = False
        self.validated = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields; an epoch whose end has begun is followed by the next."""
        self.epoch = state["epoch"]
        self.global_step = state["global_step"]
        self.batches = state["batches"]
        self.epoch_is_done = state["epoch_is_done"]
        self.validated = state["validated"]
        # Older checkpoints lack these.
        self.batches_before = state.get("batches_before", 0)
        self.last_step = state.get("last_step", 0)
        if self.epoch_is_done and state.get("end_begun", True):
            self.next_epoch()


@dataclass
class EvaluationProgress:
    """How far validation, testing or predicting is in a run.

    Attributes:
        what: the present evaluation: "validation", "test" or "predict"; "" between two.
        batches: batches of this run so far; the step of the values that are logged for each.
        predictions: the results of `predict_step` so far, a list for each loader, if they are kept.
    """

    what: str = ""
    batches: int = 0
    predictions: Sequence[list[Any]] = ()


@dataclass
class RunState:
    """What the Trainer is doing.

    Attributes:
        stage: "fit", "validate", "test", "predict", or "" between runs.
        status: "running", "finished" or "interrupted".
        fn: "fit", "validate", "test" or "predict", of the present run or the last one; None: there
            was none.
    """

    stage: str = ""
    status: str = "finished"
    fn: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last run has ended without an exception."""
        return self.status == "finished"
