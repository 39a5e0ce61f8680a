"""Three peers for real, on loopback: two average, one leaves, and one joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PEER = Path(__file__).with_name("peer.py")


class Peer:
    """A run of `peer.py`."""

    def __init__(self, folder: Path, name: str, others: tuple[str, ...]) -> None:
        self.folder, self.name = folder, name
        with (folder / f"{name}.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(PEER), str(folder), name, *others],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def steps(self) -> dict[int, list[float]]:
        """Return the weights after each batch, by the step that they belong to."""
        path = self.folder / f"{self.name}.jsonl"
        found: dict[int, list[float]] = {}
        for line in path.read_text().rpartition("\n")[0].splitlines() if path.exists() else ():
            told: dict[str, Any] = json.loads(line)
            found.setdefault(told["step"], []).append(told["weights"])
        return found

    def wait_until(self, what: Callable[[], bool], seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while not what():
            said = (self.folder / f"{self.name}.txt").read_text()[-3000:]
            assert time.monotonic() < until, said
            assert self.process.poll() is None, said
            time.sleep(0.1)

    def leave(self) -> None:
        (self.folder / f"{self.name}.end").touch()
        assert self.process.wait(120) == 0, (self.folder / f"{self.name}.txt").read_text()[-3000:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(name: str, *others: str) -> Peer:
        peer = Peer(tmp_path, name, others)
        started.append(peer)
        peer.wait_until((tmp_path / f"{name}.addresses").exists)
        return peer

    yield start
    for peer in started:
        peer.process.kill()
        peer.process.wait()


def averaged(one: Peer, other: Peer) -> int:
    """Return in how many steps both had the same weights; they begin with different ones."""
    of_one, of_other = one.steps(), other.steps()
    return sum(
        any(abs(a - b) < 1e-4 for a in of_one[step] for b in of_other[step])
        for step in of_one.keys() & of_other.keys()
    )


def test_peers_average_one_leaves_and_one_joins(start: Callable[..., Peer]) -> None:
    first = start("a")
    first.wait_until(lambda: max(first.steps(), default=0) >= 2)
    second = start("bb", "a")
    second.wait_until(lambda: averaged(first, second) >= 2)
    # It took over the count of steps, and did not begin at the first.
    assert min(second.steps()) >= 1

    second.leave()
    at = max(first.steps())
    first.wait_until(lambda: max(first.steps()) >= at + 3)

    third = start("ccc", "a")
    third.wait_until(lambda: averaged(first, third) >= 2)
    assert min(third.steps()) >= at
    third.leave()
    first.leave()
