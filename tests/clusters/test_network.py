"""Two hosts whose network is set up badly, cut, or slow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

Train = Callable[..., list[str]]
Results = Callable[..., list[dict[str, Any]]]
OnBoth = Callable[..., list[Any]]


@pytest.fixture
def on_both(hosts: Any, start: Callable[..., Any]) -> OnBoth:
    """Start one rank of a script on each host, by `stratagem run`."""

    def begin(*script: str) -> list[Any]:
        nodes = ("--num-nodes=2", "--main-address=10.78.0.1", "--main-port=29511")
        command = (sys.executable, "-m", "stratagem.cli", "run", "--devices=1", *nodes)
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
    for hook, steps, warm_up in (("none", 2, 0), ("fp16", 2, 0), ("powersgd", 7, 3)):
        options = {"hook": hook, "steps": steps, "width": 1584, "num_nodes": 2, "timeout": 300}
        for program in on_both(*train(hook, **options)[1:]):
            program.wait(300)
        took[hook] = median(results(hook)[0]["took"][warm_up:])
    print(f"seconds a step of 5.02 M parameters over 10 Mbit/s: {took}")
    assert took["none"] > 10
    assert took["none"] / took["fp16"] > 1.7
    assert took["none"] / took["powersgd"] > 40
