"""The kit on a peer that is alone, for which any batch is enough."""

from __future__ import annotations

from stratagem.testing import StrategyConformance
from stratagem_hivemind.strategy import HivemindStrategy

pytest_plugins = ["stratagem.testing.plugin"]


def alone() -> HivemindStrategy:
    return HivemindStrategy(target_batch_size=1, batch_size=1, matchmaking_time=1.0)


class TestHivemind(StrategyConformance):
    strategy = alone
    # hivemind has a thread pool and a thread of its own for futures, for the life of the process.
    kept = ("the thread asyncio_", "the thread hivemind", "the thread Thread", "the thread Pool")
    deadline = 100.0  # peers are processes, started anew for each fit
