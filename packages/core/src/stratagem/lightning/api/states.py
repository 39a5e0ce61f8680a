"""Lightning's enumerations: strings that compare equal to what Stratagem says."""

from __future__ import annotations

from enum import Enum

from stratagem.trainer.progress import RunState

TrainerState = RunState


class LightningEnum(str, Enum):
    """A string with a closed set of values; compared without regard to case."""

    @classmethod
    def from_str(cls, value: str) -> LightningEnum | None:
        """Return the member of this value or name, or None."""
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
    """What has become of a run."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it has ended, by itself or by an exception."""
        return self in (type(self).FINISHED, type(self).INTERRUPTED)


class TrainerFn(LightningEnum):
    """Which of the Trainer's four methods runs; what `setup(stage)` is given."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """What is going on within it."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is a validation, a sanity check or a test."""
        stage = type(self)
        return self in (stage.VALIDATING, stage.TESTING, stage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """What names of loaders begin with."""
        if self in (type(self).VALIDATING, type(self).SANITY_CHECKING):
            return "val"
        return self.value


class GradClipAlgorithmType(LightningEnum):
    """What of the gradients is clipped."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Whether there is such an algorithm."""
        return any(value == one.value for one in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return all of them."""
        return [one.value for one in GradClipAlgorithmType]
