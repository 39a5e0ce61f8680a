"""Profiling: passes the actions of a run to its profiler; does nothing without a profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from stratagem.profilers import Profiler
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer

Function = TypeVar("Function", bound=Callable[..., Any])


class Profiling:
    """Wraps the actions of a run for its profiler, once for each action, before the loop.

    Args:
        profiler: the Trainer's profiler. None: functions are returned unchanged.
        strategy: the class name of the strategy, for names of actions.
    """

    def __init__(self, profiler: Profiler | None, strategy: str) -> None:
        self._profiler = profiler
        self._strategy = strategy
        self._watch: Callable[[Iterator[Any]], Iterator[Any]] | None = None

    def watch_reads(self, watch: Callable[[Iterator[Any]], Iterator[Any]] | None) -> None:
        """Pass the training batches of the epochs that begin from now on through a function.

        Args:
            watch: takes the iterator of an epoch's batches, and returns the iterator to read from.
                None: the iterator is used unchanged.
        """
        self._watch = watch

    def wrap(self, action: str, function: Function) -> Function:
        """Return a function whose calls are profiled as an action."""
        if self._profiler is None:
            return function
        wrapped: Any = self._profiler.wrap(action, function)
        return wrapped  # type: ignore[no-any-return]

    def of_strategy(self, name: str, function: Function) -> Function:
        """Return a function whose calls are profiled as an action of the strategy."""
        return self.wrap(f"[Strategy]{self._strategy}.{name}", function)

    def reads(self, action: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator whose reads are profiled, and watched if it is that of training."""
        if self._watch is not None and action == "train_dataloader_next":
            batches = self._watch(batches)
        if self._profiler is None:
            return batches
        return self._profiler.profile_iterable(batches, action)

    def watch(self, step: Step) -> None:
        """Profile the backward passes and the updates of a step."""
        if self._profiler is None:
            return
        start, stop = self._profiler.start, self._profiler.stop
        backward, update = (
            f"[Strategy]{self._strategy}.{name}" for name in ("backward", "optimizer_step")
        )
        step.surround_backward(partial(_called, start, backward), partial(_called, stop, backward))
        step.surround_update(partial(_called, start, update), partial(_called, stop, update))

    def begin(self, trainer: Trainer, stage: str) -> None:
        """Set up the profiler for a run."""
        if self._profiler is not None:
            rank = trainer.global_rank if trainer.world_size > 1 else None
            self._profiler.setup(stage, rank, trainer.log_dir)

    def end(self, stage: str) -> None:
        """Print the profiler's report, and tear the profiler down."""
        if self._profiler is not None:
            self._profiler.describe()
            self._profiler.teardown(stage)


def _called(function: Callable[[str], None], action: str, *_: Any) -> None:
    """Call `function` with an action, and ignore the arguments of the hook."""
    function(action)
