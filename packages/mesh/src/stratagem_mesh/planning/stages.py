"""How a pipeline divides a model: its stages, and how many micro-batches each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Part(Protocol):
    """A part of a model, in the order of calls; see `ModuleMemory` of the planner."""

    @property
    def name(self) -> str:
        """The name of the module; "": the rest of the model, the batch and the loss."""

    @property
    def parameters(self) -> int:
        """Bytes of its parameters."""

    @property
    def activations(self) -> int:
        """Bytes that its forward keeps until backward."""

    @property
    def flops(self) -> int:
        """Operations of its forward."""

    @property
    def output(self) -> int:
        """Bytes that its forward returns."""


@dataclass(frozen=True)
class Stage:
    """The shares of a stage in the whole model, and its output for the next one.

    Attributes:
        parameters, activations, flops: between 0 and 1.
        output: bytes.
    """

    parameters: float
    activations: float
    flops: float
    output: int = 0


def cut(parts: Sequence[Part], stages: int) -> list[Stage]:
    """Return stages of which the slowest is as fast as possible.

    The rest of the model, such as the loss, belongs to the last stage; modules before the first
    layer, such as an embedding, belong to the first.

    Args:
        parts: at least as many as stages, besides the rest.
        stages: the number of stages.

    Example:
        >>> from types import SimpleNamespace as Row
        >>> parts = [Row(name=str(n), parameters=1, activations=1, flops=1, output=8)
        ...          for n in range(4)]
        >>> [stage.flops for stage in cut(parts, 2)]
        [0.5, 0.5]
    """
    named = [part for part in parts if part.name]
    rest = [part for part in parts if not part.name]
    costs = [part.flops for part in named]
    low, high = max(costs), sum(costs)
    while low < high:  # the least cost of a stage with which this number of stages is enough
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle)) <= stages else (middle + 1, high)
    groups = _filled(costs, low)
    while len(groups) < stages:  # fewer stages are as fast: divide the ones with most parts
        longest = max(range(len(groups)), key=lambda number: len(groups[number]))
        group = groups[longest]
        middle = len(group) // 2
        groups[longest : longest + 1] = [group[:middle], group[middle:]]
    members = [[named[number] for number in group] for group in groups]
    members[-1] += rest

    def share(group: Sequence[Part], figure: str) -> float:
        whole = sum(getattr(part, figure) for part in parts)
        return sum(getattr(part, figure) for part in group) / whole if whole else 1 / stages

    return [
        Stage(
            share(group, "parameters"),
            share(group, "activations"),
            share(group, "flops"),
            [part for part in group if part.name][-1].output,
        )
        for group in members
    ]


def _filled(costs: Sequence[int], most: int) -> list[list[int]]:
    """Return groups of consecutive numbers, each filled up to a cost."""
    groups: list[list[int]] = [[]]
    used = 0
    for number, cost in enumerate(costs):
        if groups[-1] and used + cost > most:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += cost
    return groups


def in_flight(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """Return the number of micro-batches that a stage holds at the most.

    GPipe runs all forward passes first. 1F1B runs the first backward pass when the last stage has
    its first output, after as many forward passes as stages follow.

    Args:
        schedule: "gpipe" or "1f1b".
        stages: the number of stages.
        stage: the number of the stage, from 0.
        micro_batches: of a step.

    Example:
        >>> in_flight("1f1b", 4, 0, 8), in_flight("1f1b", 4, 3, 8), in_flight("gpipe", 4, 3, 8)
        (4, 1, 8)
    """
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)


def bubble(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the time in which a rank of a pipeline waits, over the time in which it computes.

    Section 2.2 of "Efficient Large-Scale Language Model Training" (arXiv:2104.04473).

    Example:
        >>> bubble(4, 8), bubble(4, 8, 2)
        (0.375, 0.1875)
    """
    return (stages - 1) / (virtual_stages * micro_batches)
