"""Lightning's enumerations: strings that compare equal to what Stratagem says."""

from __future__ import annotations

from enum import Enum

from stratagem import trainer
from stratagem.trainer import RunState


class LightningEnum(str, Enum):
    """A string with a closed set of values; compared without regard to case."""

    @classmethod
    def from_str(cls, value: str) -> LightningEnum | None:
        """Return the member with this value or name.

        None: no member has it.
        """
        wanted = value.casefold().replace("-", "_")
        found = (one for one in cls if wanted in (one.value.casefold(), one.name.casefold()))
        return next(found, None)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and self.value.casefold() == other.casefold()

    def __hash__(self) -> int:
        return hash(self.value.casefold())

    def __str__(self) -> str:
        return str(self.value)


class TrainerStatus(LightningEnum):
    """The status of a run."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it has ended, by itself or by an exception."""
        return self in (type(self).FINISHED, type(self).INTERRUPTED)


class TrainerFn(LightningEnum):
    """The Trainer's method that runs; the argument of `setup(stage)`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """The stage within the method."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the stage is a validation, a sanity check or a test."""
        stage = type(self)
        return self in (stage.VALIDATING, stage.TESTING, stage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The prefix of the names of loaders."""
        if self in (type(self).VALIDATING, type(self).SANITY_CHECKING):
            return "val"
        return self.value


_STAGES = {
    "validation": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


class TrainerState:
    """The state of a Trainer in Lightning's enumerations; equal to another with equal fields.

    Args:
        of: the Trainer; None for a state from the other arguments.
        status, fn, stage: the fields of a state for a comparison with the state of a Trainer.
    """

    def __init__(
        self,
        of: trainer.Trainer | None = None,
        state: RunState | None = None,
        *,
        status: TrainerStatus = TrainerStatus.INITIALIZING,
        fn: TrainerFn | None = None,
        stage: RunningStage | None = None,
    ) -> None:
        self._trainer = of
        self._stage = stage
        own = RunState(status=status.value, fn=None if fn is None else fn.value)
        self._state = own if state is None else state

    @property
    def status(self) -> TrainerStatus:
        """How far its last run is."""
        begun = self._trainer is None or self._state.fn is not None
        return TrainerStatus(self._state.status) if begun else TrainerStatus.INITIALIZING

    @status.setter
    def status(self, status: str) -> None:
        self._state.status = str(TrainerStatus(status))

    @property
    def fn(self) -> TrainerFn | None:
        """The method of the present or last run.

        None: no run has begun.
        """
        return None if self._state.fn is None else TrainerFn(self._state.fn)

    @fn.setter
    def fn(self, fn: str | None) -> None:
        self._state.fn = None if fn is None else str(TrainerFn(fn))

    @property
    def stage(self) -> RunningStage | None:
        """The present stage.

        None: it has ended.
        """
        of = self._trainer
        if of is None:
            return self._stage
        if self._state.status != "running":
            return None
        if of.sanity_checking:
            return RunningStage.SANITY_CHECKING
        evaluated = "" if of.latest_run is None else of.latest_run.evaluation.what
        return _STAGES.get(evaluated, RunningStage.TRAINING)

    @property
    def finished(self) -> bool:
        """Whether the last run has ended without an exception."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last run has ended."""
        return self.status.stopped

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainerState):
            return NotImplemented
        return (self.status, self.fn, self.stage) == (other.status, other.fn, other.stage)

    __hash__ = None  # type: ignore[assignment]  # it changes as its Trainer runs

    def __repr__(self) -> str:
        return f"TrainerState(status={self.status}, fn={self.fn}, stage={self.stage})"


class GradClipAlgorithmType(LightningEnum):
    """The quantity that gradient clipping limits."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Whether this algorithm exists."""
        return any(value == one.value for one in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return all of them."""
        return [one.value for one in GradClipAlgorithmType]


class WriteInterval(LightningEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether the interval is each batch."""
        return self in (self.BATCH, self.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether the interval is each epoch."""
        return self in (self.EPOCH, self.BATCH_AND_EPOCH)


class Interval(LightningEnum):
    """How often a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"
