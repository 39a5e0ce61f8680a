"""A Ray cluster of two hosts on this machine, one of which is lost in the middle of a run.

The hosts are network namespaces, as for `nox -s cluster`; this needs root. `nox -s ray` runs it, or

    pytest -m cluster examples/plugins/stratagem-ray/tests/test_two_nodes.py

where Ray, core and this distribution are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_programs import RAY, TRAIN, Program, Told, clean_environment, wait_until

pytestmark = pytest.mark.cluster

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

    def __init__(self, hosts: Any, folder: Path, variables: dict[str, str]) -> None:
        self.hosts, self.folder = hosts, folder
        self.environment = clean_environment(**variables, RAY_ADDRESS=HEAD)
        self.started: list[Program] = []
        self.head = self._node(1, "--head", "--port=6379", "--include-dashboard=false")
        self.head.wait_for("Ray runtime started.")
        self.other = self._node(2, f"--address={HEAD}")
        self.other.wait_for("Ray runtime started.")

    def _node(self, number: int, *options: str) -> Program:
        address = f"--node-ip-address=10.78.0.{number}"
        start = (RAY, "start", address, "--num-cpus=2", "--block")
        return self.run(number, *start, *options)

    def run(self, number: int, *command: str) -> Program:
        """Start a program on a host."""
        place = self.folder / f"program{len(self.started)}.txt"
        program = Program(self.hosts.command(number, *command), place, self.environment)
        self.started.append(program)
        return program

    def train(self, out: Path, *options: str) -> Program:
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
def cluster(tmp_path: Path, for_rays_own: dict[str, str]) -> Iterator[RayCluster]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    clusters.need("ip", "nsenter", "unshare", packages="iproute2 util-linux")
    hosts = clusters.Hosts(tmp_path)
    made = None
    try:
        made = RayCluster(hosts, tmp_path, for_rays_own)
        yield made
    finally:
        if made is not None:
            made.close()
        hosts.close()


def result(program: Any) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(program.text().splitlines()[-1])
    return printed


def test_a_run_goes_on_exactly_on_the_node_that_is_left(cluster: RayCluster, told: Told) -> None:
    program = cluster.train(told.out, "--steps=30", "--pause=0.3")
    wait_until(told.have_taken(10), program.text)
    (first,), (second,) = told.starts(0), told.starts(1)
    # Each node has a rank, and the main address is that of rank 0's node.
    assert {first["host"], second["host"]} == {"node1", "node2"}
    assert first["main"] == {"node1": "10.78.0.1", "node2": "10.78.0.2"}[first["host"]]

    cluster.lose_node2()
    program.wait()
    assert "was lost" in program.text()
    assert "all ranks are started again (1 of 3)" in program.text()
    restarted = [told.starts(rank)[-1] for rank in (0, 1)]
    assert [(each["restart"], each["host"]) for each in restarted] == [(1, "node1")] * 2

    again = Told(told.out.with_name("again"))
    undisturbed = cluster.train(again.out, "--steps=30", f"--resume={told.resumed_from()}")
    undisturbed.wait()
    told.check_went_on_as(again)
    assert program.result() == undisturbed.result()


def test_lost_ray_node_names_missing_resources(cluster: RayCluster, told: Told) -> None:
    options = json.dumps({"resources_per_rank": {"CPU": 2}, "timeout": 12})
    program = cluster.train(told.out, "--steps=60", "--pause=0.3", f"--options={options}")
    wait_until(told.have_taken(5), program.text)
    cluster.lose_node2()
    text = program.wait(expect=1)
    assert "stratagem: waiting up to 12 s for 2 node(s) with CPU: 2 each (SPREAD); CPU: 4" in text
    assert "ConfigurationError: the Ray cluster has had no room for 2 node(s)" in text
    assert "CPU: 4 are needed, " in text
