"""Two hosts whose network is set up badly, cut, or slow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

LISTENING = Path(__file__).parents[2] / "packages/backend-torch/tests/scripts/listening.py"

Train = Callable[..., list[str]]
Results = Callable[..., list[dict[str, Any]]]
OnBoth = Callable[..., list[Any]]


@pytest.fixture
def on_both(hosts: Any, start: Callable[..., Any]) -> OnBoth:
    """Start one rank of a script on each host, by `stratagem run`."""

    def begin(*script: str) -> list[Any]:
        nodes = ("--num-nodes=2", "--main-address=10.78.0.1", "--main-port=29511")
        command = (sys.executable, "-m", "stratagem", "run", "--devices=1", *nodes)
        return [
            start(*hosts.command(1 + node, *command, f"--node-rank={node}", "--", *script))
            for node in (0, 1)
        ]

    return begin


def test_hosts_that_map_their_own_name_to_loopback_find_one_another(
    hosts: Any, on_both: OnBoth, train: Train, results: Results
) -> None:
    """As Debian's installer does; gloo then tells the others 127.0.1.1, unless it is told more."""

    def debians(number: int) -> Mapping[str, str]:
        return {"127.0.1.1": f"node{number}"}

    hosts.hosts_file(debians)
    for program in on_both(*train(num_nodes=2)[1:]):
        program.wait()
    assert [each["host"] for each in results()] == ["node1", "node2"]
    assert results()[0]["weights"] == results()[1]["weights"]


@pytest.mark.parametrize("debians", [True, False])
def test_ranks_listen_on_the_interface_that_leads_to_the_other_host_and_on_no_other(
    debians: bool, hosts: Any, on_both: OnBoth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has another one, eth1."""
    if debians:
        hosts.hosts_file(lambda number: {"127.0.1.1": f"node{number}"})
    for number in (1, 2):
        hosts.add_interface(number, f"10.79.0.{number}/24")
    monkeypatch.setenv("LISTENING_MARK", "two hosts")
    monkeypatch.setenv("NUM_NODES", "2")
    loopback, eth0 = "0100007F", ("01004E0A", "02004E0A")  # as /proc/net/tcp has them
    for number, program in enumerate(on_both(str(LISTENING), "ddp")):
        text = program.wait()
        (line,) = (line for line in text.splitlines() if line.startswith("LISTENING"))
        assert set(line.split()[1:-2]) <= {*eth0, loopback}, text
        assert eth0[number] in line


def test_ranks_of_one_host_listen_on_loopback_only(
    hosts: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the address of the host's name, on which gloo would listen."""
    monkeypatch.setenv("LISTENING_MARK", "one host")
    by_srun = {
        "SLURM_JOB_ID": "31",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_NODEID": "0",
    }
    ranks = [
        start(
            *hosts.command(1, sys.executable, str(LISTENING), "ddp"),
            env={**by_srun, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert "LISTENING 0100007F of 2" in ranks[0].wait()
    ranks[1].wait()


def test_when_the_link_is_cut_every_rank_ends_and_names_the_one_that_is_missing(
    hosts: Any, on_both: OnBoth, train: Train
) -> None:
    programs = on_both(*train(num_nodes=2, seconds=0.2, steps=1000, timeout=20)[1:])
    programs[0].wait_for("step 5 ")
    hosts.link(2, up=False)
    cut_at = time.monotonic()
    texts = [program.wait(90, expect=None) for program in programs]
    took = time.monotonic() - cut_at
    assert all(program.process.returncode != 0 for program in programs)
    assert took < 20 + 30
    for other, text in ((1, texts[0]), (0, texts[1])):
        assert f"CommunicationError: rank(s) {other} missing from backward" in text, text
        assert f"rank {other}: no answer within 4 s" in text


def test_over_a_slow_link_hooks_that_compress_gradients_show_their_gain(
    hosts: Any, on_both: OnBoth, train: Train, results: Results
) -> None:
    hosts.slow_down("10mbit")
    took: dict[str, float] = {}
    sent: dict[str, float] = {}
    for hook, steps, warm_up in (("none", 2, 0), ("fp16", 2, 0), ("powersgd", 7, 3)):
        options = {"hook": hook, "steps": steps, "width": 1584, "num_nodes": 2, "timeout": 300}
        for program in on_both(*train(hook, **options)[1:]):
            program.wait(300)
        took[hook] = median(results(hook)[0]["took"][warm_up:])
        sent[hook] = median(results(hook)[0]["sent"][warm_up:])
    print(f"a step of 5.02 M parameters over 10 Mbit/s: seconds {took}, bytes {sent}")
    assert sent["none"] / sent["fp16"] > 1.9
    assert sent["none"] / sent["powersgd"] > 100
    assert took["none"] > 10
    assert took["none"] / took["fp16"] > 1.7
    # What remains of it is computation, which takes longer on a busy machine.
    assert took["none"] / took["powersgd"] > 20
