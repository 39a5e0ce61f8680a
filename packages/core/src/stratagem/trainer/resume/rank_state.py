"""What each rank saves for itself and goes on with: its random numbers, its place in the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stratagem.data.resumable import generators_of_loader, has_persistent_workers
from stratagem.rng import (
    generator_states,
    preserve_rng_state,
    rng_state,
    set_generator_states,
    set_rng_state,
)

if TYPE_CHECKING:
    from stratagem.data.resumable import Resumable
    from stratagem.interfaces.strategy import Strategy
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.run import Run


def state_of_rank(run: Run) -> dict[str, Any]:
    """Return what this rank saves for itself; after an evaluation it has no place in the data."""
    if run.rank_state is None:
        strategy = run.strategy
        return {"random": rng_state(strategy.accelerator, strategy.device), "loader": {}}
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
        self._random: dict[str, Any] | None = None
        """The random numbers that this rank goes on with, until the loop takes them."""
        self._within_epoch = False
        self._validation: list[Any] = []

    def follow_validation(self, loaders: list[Any]) -> None:
        """Let what validation loaders hold go on too: generators and persistent workers."""
        self._validation = loaders

    def state(self) -> dict[str, Any]:
        """Return what differs between the ranks: random numbers and the loader's position."""
        return {
            "random": rng_state(self._strategy.accelerator, self._strategy.device),
            "loader": self._data.state(),
            "validation": [
                [has_persistent_workers(loader), *generator_states(generators_of_loader(loader))]
                for loader in self._validation
            ],
        }

    def resume(self, states: list[dict[str, Any]]) -> None:
        """Take what `state` returned on each rank; the progress is that of the checkpoint.

        Of more ranks than saved, the further ones keep their own random numbers.
        """
        progress, rank = self._progress, self._strategy.global_rank
        self._random = None
        if rank < len(states):
            self._random = states[rank]["random"]
            self._resume_validation(states[rank].get("validation", []))
        self._within_epoch = progress.batches > 0
        before = progress.batches
        progress.batches = self._data.resume([state["loader"] for state in states], before)
        if before:
            progress.validated = progress.validated * progress.batches // before

    def _resume_validation(self, states: list[list[Any]]) -> None:
        for loader, (had_workers, *generators) in zip(self._validation, states, strict=False):
            if had_workers:
                # To start them a loader draws a number, which that run had drawn before.
                with preserve_rng_state():
                    iter(loader)
            set_generator_states(generators_of_loader(loader), generators)

    def begin_training(self) -> None:
        """Go on with the random numbers of the checkpoint, if its epoch was at an end."""
        if not self._within_epoch:
            self._restore_random_state()

    def begin_epoch(
        self, epoch: int, done: int, of: float
    ) -> tuple[Iterator[Any], list[Any], float]:
        """Return the training batches of an epoch after the first `done` of so many.

        Returns:
            They; the last one that was passed over, if it was read; and how many they are at most.
        """
        batches, passed_over = self._data.begin(epoch, done, of)
        # Last, since the loader has drawn numbers of its own.
        self._restore_random_state()
        return batches, passed_over, self._data.left

    def close(self) -> None:
        """Let go of the training data, at the end of the fit."""
        self._data.close()

    def _restore_random_state(self) -> None:
        if self._random is not None:
            set_rng_state(self._random, self._strategy.accelerator, self._strategy.device)
            self._random = None
