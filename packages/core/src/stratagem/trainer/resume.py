"""What each rank saves for itself and goes on with: its random numbers, its place in the data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stratagem.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Strategy
    from stratagem.resumable import Resumable
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.run import Run


def state_of_rank(run: Run) -> dict[str, Any]:
    """Return what this rank saves for itself; after an evaluation it has no place in the data."""
    if run.rank_state is None:
        return {"random": random_state(), "loader": {}}
    return run.rank_state.state()


class RankState:
    """Where one rank stands in a fit.

    Args:
        strategy: of the run.
        progress: of the run.
        data: this rank's training batches.
    """

    def __init__(self, strategy: Strategy, progress: Progress, data: Resumable) -> None:
        self._strategy = strategy
        self._progress = progress
        self._data = data
        self._resumed: dict[str, Any] | None = None
        """What this rank resumes with, until the loop takes it."""
        self._told_inexact = False

    def state(self) -> dict[str, Any]:
        """Return what differs between the ranks: random numbers and the loader's position."""
        self._tell_inexact()
        return {"random": random_state(), "loader": self._data.state()}

    def _tell_inexact(self) -> None:
        """Say once, at the first save, what a resume would not repeat."""
        told, self._told_inexact = self._told_inexact, True
        if told or not self._data.inexact:
            return
        if self._strategy.is_global_zero:
            warnings.warn(
                "a run that resumes from this checkpoint in the middle of an epoch may differ: "
                + self._data.inexact,
                stacklevel=2,
            )

    def resume(self, states: list[dict[str, Any]]) -> None:
        """Take what `state` returned on each rank."""
        if len(states) == self._strategy.world_size:
            self._resumed = states[self._strategy.global_rank]
        elif self._progress.batches:
            self._divide_anew(states)

    def _divide_anew(self, states: list[dict[str, Any]]) -> None:
        """Go on after as many samples as the ranks had trained on that saved the checkpoint."""
        progress, data = self._progress, self._data
        batch_size = states[0]["loader"].get("batch_size", 1)
        of_step = data.batch_size * self._strategy.data_shard[1]
        # Ranks take samples in turn: together they have read the first ones of the epoch's order.
        samples = progress.batches * batch_size * len(states)
        progress.batches, again = divmod(samples, of_step)
        if self._strategy.is_global_zero and (again or not data.is_ordered):
            what = (
                f"{again} samples are trained on again"
                if data.is_ordered
                else "its random order is another one, so that some samples are trained on again "
                "and others are left out"
            )
            warnings.warn(
                f"the checkpoint was saved by {len(states)} rank(s) in the middle of an epoch, and "
                f"these are {self._strategy.world_size}: {what}",
                stacklevel=2,
            )

    def begin_training(self) -> None:
        """Go on with the random numbers of the checkpoint, if its epoch was at an end."""
        if self._resumed is not None and self._progress.batches == 0:
            set_random_state(self._resumed["random"])
            self._resumed = None

    def begin_epoch(self, epoch: int, done: int) -> tuple[Iterator[Any], list[Any]]:
        """Return the training batches of an epoch after the first `done`.

        Returns:
            They, and the last one that was passed over, if it was read.
        """
        resumed, self._resumed = self._resumed, None
        loader_state = None if resumed is None else resumed["loader"]
        begun = self._data.begin(epoch, done, loader_state)
        if resumed is not None:
            # Last, since the loader has drawn numbers of its own.
            set_random_state(resumed["random"])
        return begun
