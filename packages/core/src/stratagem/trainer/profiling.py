"""Profiling: hands the actions of a run to its profiler; where there is none, nothing is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from stratagem.profilers import Profiler
    from stratagem.trainer.run import Run
    from stratagem.trainer.step.step import Step

Function = TypeVar("Function", bound=Callable[..., Any])


class Profiling:
    """The profiler of a run, which is asked once for each action, before the loop.

    Args:
        profiler: of the Trainer; None: functions are returned as they are.
        strategy: the name of its class, in names of actions.
    """

    def __init__(self, profiler: Profiler | None, strategy: str) -> None:
        self._profiler = profiler
        self._strategy = strategy

    def wrap(self, action: str, function: Function) -> Function:
        """Return a function that is profiled as an action whenever it is called."""
        if self._profiler is None:
            return function
        wrapped: Any = self._profiler.wrap(action, function)
        return wrapped  # type: ignore[no-any-return]

    def of_strategy(self, name: str, function: Function) -> Function:
        """Return one that is profiled as the strategy's."""
        return self.wrap(f"[Strategy]{self._strategy}.{name}", function)

    def reads(self, action: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of which each reading is profiled."""
        if self._profiler is None:
            return batches
        return self._profiler.profile_iterable(batches, action)

    def watch(self, step: Step) -> None:
        """Profile what a step consists of."""
        if self._profiler is None:
            return
        start, stop = self._profiler.start, self._profiler.stop
        backward, update = (
            f"[Strategy]{self._strategy}.{name}" for name in ("backward", "optimizer_step")
        )
        step.surround_backward(partial(_called, start, backward), partial(_called, stop, backward))
        step.surround_update(partial(_called, start, update), partial(_called, stop, update))

    def begin(self, run: Run) -> None:
        """Begin a run."""
        if self._profiler is not None:
            ranks = run.strategy.ranks
            rank = ranks.global_rank if ranks.world_size > 1 else None
            self._profiler.setup(run.stage, rank, run.trainer.log_dir)

    def end(self, run: Run) -> None:
        """Report on it."""
        if self._profiler is not None:
            self._profiler.describe()
            self._profiler.teardown(run.stage)


def _called(function: Callable[[str], None], action: str, *_: Any) -> None:
    """Call `function` as a hook, whose own arguments say nothing here."""
    function(action)
