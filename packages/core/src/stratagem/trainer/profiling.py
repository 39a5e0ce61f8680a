"""Profiling: passes the actions of a run to its profiler; does nothing without a profiler."""

from __future__ import annotations

from collections import defaultdict
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

    Attributes:
        watches: functions by the name of an action. Each takes and returns the action's function,
            or the iterator of an action of reads. Add them in `on_fit_start` or before.
    """

    def __init__(self, profiler: Profiler | None, strategy: str) -> None:
        self._profiler = profiler
        self._strategy = strategy
        self.watches: dict[str, list[Callable[[Any], Any]]] = defaultdict(list)

    def wrap(self, action: str, function: Function) -> Function:
        """Return a function whose calls are watched, and profiled as an action."""
        wrapped: Any = function
        for watch in self.watches.get(action, ()):
            wrapped = watch(wrapped)
        return wrapped if self._profiler is None else self._profiler.wrap(action, wrapped)  # type: ignore[return-value]

    def of_strategy(self, name: str, function: Function) -> Function:
        """Return a function whose calls are profiled as an action of the strategy."""
        return self.wrap(f"[Strategy]{self._strategy}.{name}", function)

    def reads(self, action: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator whose reads are watched and profiled."""
        for watch in self.watches.get(action, ()):
            batches = watch(batches)
        profiler = self._profiler
        return batches if profiler is None else profiler.profile_iterable(batches, action)

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
