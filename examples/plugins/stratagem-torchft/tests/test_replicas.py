"""Two replicas for real: one is killed in the middle, the other goes on, and it rejoins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchft.coordination import LighthouseServer

REPLICA = Path(__file__).with_name("replica.py")


class Replica:
    """A run of `replica.py`; it waits at its beginning for the replica `peer`, if one is named."""

    def __init__(
        self, folder: Path, lighthouse: str, name: str, number: int, peer: str, timeout: float
    ) -> None:
        self.path, self.output = folder / f"{name}.jsonl", folder / f"{name}.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(REPLICA), str(folder)),
                    *(name, str(number), peer or name, str(timeout)),
                ],
                env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def lines(self) -> list[dict[str, Any]]:
        whole = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_lines(self, number: int, seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while len(self.lines()) < number:
            assert time.monotonic() < until, self.output.read_text()[-3000:]
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.05)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20000, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def start(tmp_path: Path, lighthouse: str) -> Iterator[Callable[..., Replica]]:
    started: list[Replica] = []

    def start(name: str, number: int, peer: str = "", timeout: float = 60.0) -> Replica:
        started.append(Replica(tmp_path, lighthouse, name, number, peer, timeout))
        return started[-1]

    yield start
    for replica in started:
        replica.process.kill()
        replica.process.wait()


def test_killed_torchft_replica_rejoins_the_other(
    start: Callable[..., Replica], tmp_path: Path
) -> None:
    one = start("one", 0, peer="other")
    one.wait_for_lines(1)
    other = start("other", 1)
    other.wait_for_lines(10)
    other.process.send_signal(signal.SIGKILL)
    other.process.wait()
    killed_at = other.lines()[-1]["step"]
    one.wait_for_lines(killed_at + 5)
    again = start("again", 1)
    again.wait_for_lines(20)
    end = len(one.lines()) + 100
    (tmp_path / "written").write_text(str(end))
    (tmp_path / "written").rename(tmp_path / "end")
    assert one.process.wait(120) == 0
    assert again.process.wait(120) == 0

    first, before, after = one.lines(), other.lines(), again.lines()
    # The one that stayed took each step once, whatever became of the other; both ended together.
    assert [line["step"] for line in first] == list(range(1, end + 1))
    assert [line["step"] for line in before] == list(range(before[0]["step"], killed_at + 1))
    assert before[0]["step"] > 3
    assert [line["step"] for line in after] == list(range(after[0]["step"], end + 1))
    assert after[0]["step"] > killed_at + 5
    # Weights are alike in each step that both took, though they did not begin alike.
    weights = {line["step"]: line["weights"] for line in first}
    for line in before + after:
        assert line["weights"] == weights[line["step"]], line["step"]
    # In an epoch neither has read a sample twice, or one of the other's part; one that both have
    # read from end to end was read whole.
    for epoch in range(first[-1]["epoch"] + 1):
        of_one = [n for line in first if line["epoch"] == epoch for n in line["seen"]]
        of_other = [n for line in before + after if line["epoch"] == epoch for n in line["seen"]]
        assert len({*of_one, *of_other}) == len(of_one) + len(of_other)
        if after[0]["epoch"] < epoch < first[-1]["epoch"]:
            assert len(of_one) + len(of_other) == 256


@pytest.mark.parametrize("where", ["within", "between"])
def test_a_replica_that_stood_still_for_several_steps_ends_and_says_so(
    where: str, start: Callable[..., Replica], tmp_path: Path
) -> None:
    """A machine that was suspended: its run counts its own steps, which are not the others'."""
    one = start("one", 0, peer="other", timeout=15.0)
    one.wait_for_lines(1)
    other = start("other", 1, timeout=15.0)
    other.wait_for_lines(10)
    asked = tmp_path / f"other.{where}"
    asked.touch()
    until = time.monotonic() + 60
    while asked.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    stopped_at = other.lines()[-1]["step"]
    one.wait_for_lines(stopped_at + 5)
    other.process.send_signal(signal.SIGCONT)
    assert other.process.wait(120) == 1
    said = other.output.read_text()
    assert "steps of the others while it ran: start it again, and it goes on from their" in said
    # Nothing was trained on what it had in its hands, and the other one has not noticed.
    assert other.lines()[-1]["step"] <= stopped_at + 1
    seen = len(one.lines())
    one.wait_for_lines(seen + 5)
    again = start("again", 1, timeout=15.0)
    again.wait_for_lines(3)
    assert again.lines()[0]["step"] > seen
    weights = {line["step"]: line["weights"] for line in one.lines()}
    assert all(weights[each["step"]] == each["weights"] for each in again.lines()[:2])


def test_a_replica_that_fails_leaves_the_others_though_its_process_stays(
    start: Callable[..., Replica], tmp_path: Path
) -> None:
    """An error in a notebook does not end the process."""
    one = start("one", 0, peer="other")
    one.wait_for_lines(1)
    other = start("other", 1)
    other.wait_for_lines(5)
    (tmp_path / "other.fails").touch()
    until = time.monotonic() + 60
    while "failed: planted" not in other.output.read_text():
        assert time.monotonic() < until, other.output.read_text()[-3000:]
        time.sleep(0.05)
    one.wait_for_lines(len(one.lines()) + 10)
    assert other.process.poll() is None
