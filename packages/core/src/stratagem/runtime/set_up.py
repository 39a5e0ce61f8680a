"""Strategies that were set up: each is torn down once, though its front end may be gone before."""

from __future__ import annotations

import gc
import weakref

from stratagem.discovery.entry_points import is_ours
from stratagem.errors import PluginError
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.rank import at_end_of_rank, fail_at_end


class SetUp:
    """The teardown that a strategy is owed.

    The reference to the strategy is weak, because a strategy may hold its Trainer and the model. A
    strategy that is garbage-collected hands itself to `left`, to be torn down at the next set-up of
    a front end, or when the process ends: a teardown within a collection of garbage could run at
    any line of a training step.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._alive = weakref.ref(strategy)
        self.left: Strategy | None = None
        self.has_own_teardown = not is_ours(type(strategy).teardown.__module__)
        _owed.append(self)
        # Before the end of the process group, which is registered earlier.
        at_end_of_rank(self.end)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Give a copy of the strategy none: it was not set up."""
        return type(None), ()

    def teardown(self) -> None:
        """Tear the strategy down, unless that was done."""
        if self not in _owed:
            return
        _owed.remove(self)
        strategy, self.left = self.left or self._alive(), None
        if strategy is not None:
            strategy._set_up = None
            strategy.teardown()

    def end(self) -> None:
        """Tear the strategy down at the end of the process."""
        alive = self.left or self._alive()
        try:
            self.teardown()
        # No caller catches it here: Python would print it as ignored and exit with code 0.
        except Exception as error:
            name = type(alive).__name__
            fail_at_end(error, f"{name}.teardown() failed after the run was done")


_owed: list[SetUp] = []


def note_set_up(strategy: Strategy) -> None:
    """Note that a strategy was set up, and is to be torn down once."""
    if strategy._set_up is None:
        strategy._set_up = SetUp(strategy)


def tear_down_left() -> None:
    """Tear down the strategies without a living front end; called before the next set-up.

    Raises:
        PluginError: a teardown failed; the message names the strategy.
    """
    # All ranks at this line, and not each when its collector runs. It takes 0.1 s, which our own
    # teardowns do without: they hold nothing that the next set-up needs.
    if any(each.has_own_teardown for each in _owed):
        gc.collect()
    for each in [each for each in _owed if each.left is not None]:
        name = type(each.left).__name__
        try:
            each.teardown()
        except Exception as error:
            raise PluginError(f"{name}.teardown() failed: {error}") from error
