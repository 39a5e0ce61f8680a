"""The kit on one replica of two ranks, which meets nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torchft.coordination import LighthouseServer

from stratagem_testing import StrategyConformance


@pytest.fixture(scope="module", autouse=True)
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=500
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = server.address()
    yield server.address()
    del os.environ["TORCHFT_LIGHTHOUSE"]
    server.shutdown()


class TestTorchFT(StrategyConformance):
    strategy = "torchft"
    # torchft has one object for all time limits, and no public way to end its two threads.
    allowed_leftovers = ("the thread TimeoutManager", "the thread Thread-1 (_watchdog_loop)")
