"""A Ray cluster of two hosts on this machine, one of which is lost in the middle of a run.

The hosts are network namespaces, as for `nox -s cluster`; this needs root. `nox -s ray` runs it, or

    pytest -m cluster examples/plugins/stratagem-ray/tests/test_two_nodes.py

where Ray, core and this distribution are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

TRAIN = Path(__file__).with_name("train.py")
CLUSTERS = Path(__file__).resolve().parents[4] / "tests/clusters/conftest.py"
HEAD = "10.78.0.1:6379"


def load_clusters() -> Any:
    """Return the module with the hosts of `nox -s cluster`."""
    spec = importlib.util.spec_from_file_location("two_hosts", CLUSTERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


clusters = load_clusters()


class RayCluster:
    """A head on node1 and another node, each with room for two ranks, in programs that stay."""

    def __init__(self, hosts: Any, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.environment = {
            "RAY_ADDRESS": HEAD,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.started: list[Any] = []
        self.head = self._node(1, "--head", "--port=6379", "--include-dashboard=false")
        self.head.wait_for("Ray runtime started.")
        self.other = self._node(2, f"--address={HEAD}")
        self.other.wait_for("Ray runtime started.")

    def _node(self, number: int, *options: str) -> Any:
        ray = str(Path(sys.executable).with_name("ray"))
        address = f"--node-ip-address=10.78.0.{number}"
        start = (ray, "start", address, "--num-cpus=2", "--block", "--disable-usage-stats")
        return self.run(number, *start, *options)

    def run(self, number: int, *command: str) -> Any:
        """Start a program on a host."""
        place = self.folder / f"program{len(self.started)}.txt"
        program = clusters.Started(self.hosts.command(number, *command), place, self.environment)
        self.started.append(program)
        return program

    def train(self, out: Path, *options: str) -> Any:
        """Start train.py on node1, with two nodes of one rank each."""
        return self.run(1, sys.executable, str(TRAIN), str(out), "--num-nodes=2", *options)

    def lose_node2(self) -> None:
        """End all that runs on node2, in no order, as its machine would end."""
        pids = clusters.run("ip", "netns", "pids", "sgnode2").split()
        for process in map(int, pids):
            os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        for program in reversed(self.started):
            program.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    clusters.need("ip", "nsenter", "unshare", packages="iproute2 util-linux")
    hosts = clusters.Hosts(tmp_path)
    made = None
    try:
        made = RayCluster(hosts, tmp_path)
        yield made
    finally:
        if made is not None:
            made.close()
        hosts.close()


def told(out: Path, rank: int) -> list[dict[str, Any]]:
    file = out / f"rank{rank}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def starts(out: Path, rank: int) -> list[dict[str, Any]]:
    return [line for line in told(out, rank) if "pid" in line]


def losses(out: Path, rank: int) -> dict[int, float]:
    """Return the losses of a rank by step; those of a step that was taken again are the last."""
    return {line["step"]: line["loss"] for line in told(out, rank) if "step" in line}


def wait_for_step(out: Path, step: int) -> Callable[[], bool]:
    return lambda: step in losses(out, 0) and step in losses(out, 1)


def result(program: Any) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(program.text().splitlines()[-1])
    return printed


def test_a_run_goes_on_exactly_on_the_node_that_is_left(
    cluster: RayCluster, tmp_path: Path
) -> None:
    out, again = tmp_path / "run", tmp_path / "again"
    program = cluster.train(out, "--steps=30", "--pause=0.3")
    clusters.wait_until(wait_for_step(out, 10), 180, program.text)
    (first,), (second,) = starts(out, 0), starts(out, 1)
    # Each node has a rank, and rank 0's address is its node's.
    hosts = {first["host"], second["host"]}
    assert hosts == {"node1", "node2"}
    assert first["main"] == {"node1": "10.78.0.1", "node2": "10.78.0.2"}[first["host"]]

    cluster.lose_node2()
    program.wait(240)

    assert "was lost" in program.text()
    assert "all ranks are started again (1 of 3)" in program.text()
    for rank in (0, 1):
        restarted = starts(out, rank)[-1]
        assert (restarted["restart"], restarted["host"]) == (1, "node1")
    # The first step after the last checkpoint before the loss: what is in the files tells.
    steps = [line["step"] for line in told(out, 0) if "step" in line]
    resumed = next(b for a, b in zip(steps, steps[1:], strict=False) if b <= a)
    checkpoint = next((out / "checkpoints").glob(f"*-step={resumed - 1}.ckpt"))

    # A run from that checkpoint that nothing disturbs.
    undisturbed = cluster.train(again, "--steps=30", f"--resume={checkpoint}")
    undisturbed.wait(180)
    for rank in (0, 1):
        expected = losses(again, rank)
        assert min(expected) == resumed
        assert {step: losses(out, rank)[step] for step in expected} == expected
    assert result(program) == result(undisturbed)


def test_without_room_on_the_node_that_is_left_it_says_what_is_missing(
    cluster: RayCluster, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = {"resources_per_rank": {"CPU": 2}, "timeout": 12}
    program = cluster.train(
        out, "--steps=60", "--pause=0.3", f"--options={json.dumps(options)}"
    )
    clusters.wait_until(wait_for_step(out, 5), 180, program.text)
    cluster.lose_node2()
    text = program.wait(180, expect=1)
    assert "stratagem: waiting up to 12 s for 2 node(s) with CPU: 2 each (SPREAD); CPU: 4" in text
    assert "ConfigurationError: the Ray cluster has had no room for 2 node(s)" in text
    assert "CPU: 4 are needed, " in text
