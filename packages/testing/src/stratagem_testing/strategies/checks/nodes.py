"""Nodes: the ranks of two nodes, played on one machine, whose local ranks are not their ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stratagem_testing.strategies.check import CHECKS, Check, Result, check
from stratagem_testing.strategies.checks.collectives import TOGETHER
from stratagem_testing.strategies.checks.state import on_single_device
from stratagem_testing.strategies.probe import Probe
from stratagem_testing.strategies.target import REFERENCE

TRIED = (*(each.name for each in TOGETHER), "data/sampler", "steps/several")
"""The checks that are run again; the saves of "state/into single_device" come last."""
SAVES = "state/into single_device"


def _run(probe: Probe) -> dict[str, Any]:
    names = TRIED if probe.target.strategy != REFERENCE else ("steps/several",)
    told: dict[str, Any] = {name: CHECKS[name].run(probe) for name in names}
    if probe.target.strategy != REFERENCE:
        told[SAVES] = CHECKS[SAVES].run(probe)
    return told


def _judge(found: Result) -> None:
    for name in (*TRIED, SAVES):
        reference = found.reference[name] if CHECKS[name].reference else None
        ranks = [told[name] for told in found.ranks]
        try:
            CHECKS[name].judge(replace(found, ranks=ranks, reference=reference))
        except AssertionError as error:
            raise AssertionError(
                f"{name}, on {found.target.nodes} nodes: {error}\nOne node may be right: look at "
                "what uses ranks.local_rank, or the ranks of one node, for global_rank and "
                "world_size"
            ) from None


def _register(what: str, ranks: int) -> Check:
    return check(
        f"nodes/two of {what}",
        _judge,
        about=f"Collectives, data, steps and saves are right on two nodes of {what}, where the "
        "local rank is not the global rank. One machine plays both nodes.",
        reference=True,
        after=on_single_device,
        ranks=ranks,
        nodes=2,
    )(_run)


_register("one rank", 2)
_register("two ranks", 4)
