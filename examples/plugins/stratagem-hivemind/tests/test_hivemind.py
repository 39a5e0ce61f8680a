"""The kit on a peer that is alone, for which any batch is enough."""

from __future__ import annotations

from stratagem_hivemind.strategy import HivemindStrategy
from stratagem_testing import StrategyConformance


def alone() -> HivemindStrategy:
    # A look at the others, of which there are none, may undo what was counted in that moment.
    never = dict.fromkeys(("min", "default", "max"), 600.0)
    return HivemindStrategy(
        target_batch_size=1,
        batch_size=1,
        # Nobody comes: what is waited for others is waited in each of a hundred runs.
        matchmaking_time=0.2,
        averaging_timeout=1.0,
        tracker_opts={f"{name}_refresh_period": seconds for name, seconds in never.items()},
    )


class TestHivemind(StrategyConformance):
    strategy = alone
    # hivemind has a thread pool and a thread of its own for futures, for the life of the process.
    allowed_leftovers = ("the thread asyncio_", "the thread hivemind.utils.mpfuture.BACKEND")
    deadline = 400.0  # peers are processes, started anew for each fit
    zeros_for_unused = True  # hivemind gives every parameter a gradient
