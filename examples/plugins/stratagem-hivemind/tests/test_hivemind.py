"""The kit on a peer that is alone, for which any batch is enough."""

from __future__ import annotations

import time

import hivemind
import pytest

from stratagem_hivemind import strategy
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


def stand_still(monkeypatch: pytest.MonkeyPatch, first: int) -> list[hivemind.DHT]:
    """Let the first so many tables stand still, as a fork may; return the list of all tables."""
    monkeypatch.setattr(strategy, "SECONDS_TO_START", 10.0)
    start, run = hivemind.DHT.start, hivemind.DHT.run
    made: list[hivemind.DHT] = []

    def start_and_count(table: hivemind.DHT) -> None:
        made.append(table)
        start(table)

    def run_late(table: hivemind.DHT) -> None:
        if len(made) <= first:
            time.sleep(600)
        run(table)

    monkeypatch.setattr(hivemind.DHT, "start", start_and_count)
    monkeypatch.setattr(hivemind.DHT, "run", run_late)
    return made


def test_a_table_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_still(monkeypatch, 1)
    assert alone().visible_peers
    assert [table.is_alive() for table in made] == [False, True]
    made[1].shutdown()


def test_tables_that_all_stand_still_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_still(monkeypatch, 2)
    with pytest.raises(RuntimeError, match="did not serve within 10 seconds, in each of 2 proc"):
        alone().visible_peers  # noqa: B018
    assert not any(table.is_alive() for table in made)
