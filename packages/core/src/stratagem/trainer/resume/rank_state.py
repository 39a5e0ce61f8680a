"""RankState: the state of each rank: RNG states, position in the data, values of the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stratagem.data.sharding import has_persistent_workers
from stratagem.rng import (
    generator_states,
    generators_of,
    generators_of_data,
    preserve_rng_state,
    rng_state,
    set_generator_states,
    set_rng_state,
    try_rng_state,
)
from stratagem.trainer.resume.epoch_state import FORM as EPOCH_FORM, EpochState

if TYPE_CHECKING:
    import torch

    from stratagem.interfaces.accelerator import Accelerator
    from stratagem.interfaces.ranks import Ranks
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module import Module
    from stratagem.state.rank_states import RankStates
    from stratagem.trainer.context import FitState
    from stratagem.trainer.loaders.train_loader import TrainLoader


FORM = {"random": dict, "module?": list, "loader": dict, "validation?": [list], "epoch?": dict}
"""The form of `RankState.state`."""


def state_of_rank(strategy: Strategy, rank_state: RankState | None) -> dict[str, Any]:
    """Return the state that only this rank has; after an evaluation, without data position."""
    if rank_state is None:
        return {"random": rng_state(strategy.accelerator, strategy.device), "loader": {}}
    return rank_state.state()


@dataclass
class RankState:
    """The state of one rank in a fit: RNG states, position in the data, and the epoch's values.

    Attributes:
        ranks: the ranks of the run.
        fit_state: the state of the training loop.
        loader: this rank's training loader.
        validation: this rank's validation loaders, for the states of their generators and
            persistent workers.
        epoch: the values of the current epoch.
        rng_of: this rank's accelerator and device, for the device's RNG state.
        module: the user's module, for the states of the generators that its parts hold.
    """

    ranks: Ranks
    fit_state: FitState
    loader: TrainLoader
    validation: Sequence[Any]
    epoch: EpochState
    rng_of: tuple[Accelerator, torch.device]
    module: Module
    _resumed: dict[str, Any] | None = field(default=None, init=False)
    """The state whose RNG states the loop has yet to restore."""
    _kept: dict[str, Any] = field(default_factory=dict, init=False)
    """The parts of the state that checkpoints have in place of the present ones."""
    _within_epoch: bool = field(default=False, init=False)

    def state(self) -> dict[str, Any]:
        """Return the state that differs between ranks, as weights-only-safe data."""
        loader = self.loader.state(within_epoch=not self.fit_state.epoch_is_done)
        return {**self.values(), "loader": loader, **self._kept}

    def values(self, *, warns: bool = True) -> dict[str, Any]:
        """Return the state without the position in the data; see `EpochState.state`."""
        return {
            "random": rng_state(*self.rng_of),
            "module": generator_states(generators_of(*self.module.modules())),
            "validation": [
                [has_persistent_workers(loader), *generator_states(generators_of_data(loader))]
                for loader in self.validation
            ],
            "epoch": self.epoch.state(warns=warns),
        }

    def keep(self, **parts: Any) -> None:
        """Let checkpoints have these parts of the state in place of the present ones.

        At the start of a validation, with which a resumed run begins again; when an epoch ends
        early, and callbacks change its values; and when what follows is not a part of training.
        """
        self._kept = parts

    def resume(self, states: RankStates) -> None:
        """Restore the states of the saving ranks; the checkpoint's `FitState` is restored before.

        If this run has more ranks, the additional ranks keep their own RNG states.
        """
        state, rank = self.fit_state, self.ranks.global_rank
        self._resumed = states[rank] if rank < len(states) else None
        if self._resumed is not None:
            generators = generators_of(*self.module.modules())
            try_rng_state(self._resumed["random"], generators, self._resumed.get("module", ()))
            self._resume_validation(self._resumed.get("validation", []))
        self._within_epoch = state.batches > 0 and not state.epoch_is_done
        before = state.batches
        batches = self.loader.resume(states.of("loader"), before if self._within_epoch else 0)
        if "epoch" in states[0]:
            self.epoch.resume(states.of("epoch", EPOCH_FORM))
        if self._within_epoch:
            state.batches = batches
            state.validated = state.validated * state.batches // before
            state.batches_before = state.batches_before * state.batches // before

    def _resume_validation(self, states: list[list[Any]]) -> None:
        for loader, (had_workers, *generators) in zip(self.validation, states, strict=False):
            try_rng_state(rng_state(), generators_of_data(loader), generators)
            if had_workers is True:
                # To start them a loader draws a number, which that run had drawn before.
                with preserve_rng_state():
                    iter(loader)
            set_generator_states(generators_of_data(loader), generators)

    def begin_training(self) -> None:
        """Restore the RNG states and values of a checkpoint from the end of an epoch."""
        if self.fit_state.epoch_is_done:
            self.epoch.restore_epoch()
        if not self._within_epoch:
            self._restore_rng()

    def begin_epoch(self) -> None:
        """Begin the current epoch after its finished batches."""
        self.loader.begin_epoch(self.fit_state.epoch, self.fit_state.batches)
        if self._within_epoch:
            # After the hooks of the epoch's start, which reset metrics and log.
            self.epoch.restore_epoch()
            self._within_epoch = False
        # Last, since the loader has drawn numbers of its own.
        self._restore_rng()

    def _restore_rng(self) -> None:
        if self._resumed is not None:
            set_rng_state(self._resumed["random"], *self.rng_of)
            generators = generators_of(*self.module.modules())
            set_generator_states(generators, self._resumed.get("module", ()))
            self._resumed = None
