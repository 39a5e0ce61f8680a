"""The order of forward and backward passes in a step of a pipeline, and the time that it takes.

Stage v lies on position v % P of a pipeline of P positions. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from stratagem.errors import ConfigurationError

__all__ = [
    "SCHEDULES",
    "Action",
    "Span",
    "Timeline",
    "actions",
    "bubble",
    "check_schedule",
    "most_in_flight",
    "timeline",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The names of the schedules."""


class Action(NamedTuple):
    """A pass of one micro-batch over one stage.

    Example:
        >>> str(Action("forward", 2, 3))
        'forward of stage 2, micro-batch 3'
    """

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


class Span(NamedTuple):
    """An action, and the time of its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of a step.

    Attributes:
        spans: the actions of each position, in their order.
        in_flight: for each position, the most passes that wait for their backward pass at a time:
            a position with two stages counts a micro-batch of each.
    """

    spans: tuple[tuple[Span, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def time(self) -> float:
        """The time of the step."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the positions' time in which they wait."""
        busy = sum(span.end - span.start for span in chain.from_iterable(self.spans))
        total = self.time * len(self.spans)
        return 1 - busy / total if total else 0.0


def check_schedule(schedule: str, virtual_stages: int) -> None:
    """Check the name of a schedule and the number of stages on each position.

    Args:
        schedule: a name in `SCHEDULES`.
        virtual_stages: the number of stages on each position.

    Raises:
        ConfigurationError: the name is unknown, or the number does not suit the schedule.

    Example:
        >>> check_schedule("interleaved", 2)
    """
    if schedule not in SCHEDULES:
        names = ", ".join(f'"{name}"' for name in SCHEDULES[:-1])
        raise ConfigurationError(
            f'schedule={schedule!r}: expected {names} or "{SCHEDULES[-1]}", as a string'
        )
    if schedule == "interleaved" and virtual_stages == 1:
        raise ConfigurationError(
            'schedule="interleaved" with virtual_stages=1: expected several stages on each rank. '
            'Write virtual_stages=2, or schedule="1f1b"'
        )
    if schedule != "interleaved" and virtual_stages > 1:
        raise ConfigurationError(
            f'schedule="{schedule}" with virtual_stages={virtual_stages}: expected one stage on '
            'each rank. Write schedule="interleaved", or virtual_stages=1'
        )


def actions(
    schedule: str, positions: int, virtual_stages: int, micro_batches: int
) -> list[list[Action]]:
    """Return the actions of each position in a step, in their order.

    - `"gpipe"`: all forward passes, then all backward passes.
    - `"1f1b"`: a position alternates between a forward and a backward pass as soon as the first
      backward pass is possible. Position p has at most P - p micro-batches in flight.
    - `"interleaved"`: the same, with several stages on each position.

    Backward passes of a stage follow the order of the micro-batches, as in one process, so the sum
    of gradients rounds alike.

    Args:
        schedule: a name in `SCHEDULES`.
        positions: the number of ranks along the pipeline.
        virtual_stages: the number of stages on each position.
        micro_batches: the number of micro-batches of a step.

    Raises:
        ConfigurationError: see `check_schedule`; or a number is below 1.

    Example:
        >>> [f"{a.kind[0]}{a.micro_batch}" for a in actions("1f1b", 2, 1, 3)[0]]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    counts = {
        "pipeline": positions,
        "virtual_stages": virtual_stages,
        "micro_batches": micro_batches,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigurationError(f"{name}={count}: expected a number of at least 1")
    check_schedule(schedule, virtual_stages)
    size, passes = _passes(positions if virtual_stages > 1 else 1, virtual_stages, micro_batches)
    result = []
    for position in range(positions):
        after = positions - position - 1
        ahead = {
            "gpipe": len(passes),
            "1f1b": after,
            "interleaved": 2 * after + (virtual_stages - 1) * size,
        }[schedule]
        stages = range(position, positions * virtual_stages, positions)
        forwards = [Action("forward", stages[chunk], m) for chunk, m in passes]
        backwards = [Action("backward", stages[-1 - chunk], m) for chunk, m in passes]
        pairs = chain.from_iterable(zip_longest(forwards[ahead:], backwards))
        order = [*forwards[:ahead], *(action for action in pairs if action)]
        result.append([action for action in order if action.micro_batch != _NONE])
    return result


_NONE = -1
"""Takes the place of a micro-batch in the smaller groups."""


def _passes(
    positions: int, virtual_stages: int, micro_batches: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the size of a group, and the forward passes of a position: (which stage, micro-batch).

    All micro-batches of a group pass one stage of a position, then its next stage. In a group of at
    least P, no position waits for that. Smaller groups are filled up, and follow the order of equal
    groups. An order without some micro-batches can be met too, since no pass depends on another
    micro-batch.
    """
    number = max(micro_batches // positions, 1)
    size = max(-(-micro_batches // number), positions)
    passes = []
    for group in range(number):
        first, end = (micro_batches * (group + k) // number for k in (0, 1))
        members = [*range(first, end), *[_NONE] * (size - end + first)]
        passes += [(chunk, member) for chunk in range(virtual_stages) for member in members]
    return size, passes


def timeline(
    orders: Sequence[Sequence[Action]],
    forward_times: Sequence[float],
    backward_times: Sequence[float],
    transfer: float = 0.0,
) -> Timeline:
    """Return when each action starts and ends if each begins as soon as it can.

    Args:
        orders: the actions of each position, from `actions`.
        forward_times: the time of a forward pass of each stage.
        backward_times: the time of a backward pass of each stage.
        transfer: the time of a transfer between two positions, which occupies neither of them.

    Raises:
        ConfigurationError: the positions would wait for each other for ever.

    Example:
        >>> step = timeline(actions("1f1b", 4, 1, 8), [1.0] * 4, [2.0] * 4)
        >>> step.time, round(step.bubble, 3), step.in_flight
        (33.0, 0.273, (4, 3, 2, 1))
    """
    last = len(forward_times) - 1
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for position, (order, done) in enumerate(zip(orders, spans, strict=True)):
            while len(done) < len(order):
                action = order[len(done)]
                needed = _needed(action, last)
                if not ends.keys() >= set(needed):
                    break
                arrivals = [
                    ends[other] + transfer * (other.stage % len(orders) != position)
                    for other in needed
                ]
                start = max([done[-1].end if done else 0.0, *arrivals])
                times = forward_times if action.kind == "forward" else backward_times
                ends[action] = start + times[action.stage]
                done.append(Span(action, start, ends[action]))
                moved = True
    for order, done in zip(orders, spans, strict=True):
        if len(done) < len(order):
            action = order[len(done)]
            missing = [str(other) for other in _needed(action, last) if other not in ends]
            raise ConfigurationError(
                f"the {action}, waits for ever for the {missing[0]}: expected an order of actions "
                "in which each comes after those that it needs"
            )
    return Timeline(tuple(map(tuple, spans)), tuple(map(most_in_flight, orders)))


def _needed(action: Action, last: int) -> list[Action]:
    """Return the actions that must have ended before, of the nearest stages."""
    kind, stage, micro_batch = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    needed = [Action("forward", stage, micro_batch)]
    return needed if stage == last else [*needed, Action("backward", stage + 1, micro_batch)]


def most_in_flight(order: Sequence[Action]) -> int:
    """Return the most passes of a position that wait for their backward pass at a time.

    Args:
        order: the actions of the position, from `actions`.

    Example:
        >>> [most_in_flight(order) for order in actions("1f1b", 4, 1, 8)]
        [4, 3, 2, 1]
    """
    held = most = 0
    for action in order:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def bubble(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the time in which a position waits, over the time in which it computes.

    Section 2.2 of "Efficient Large-Scale Language Model Training" (arXiv:2104.04473).

    Args:
        stages: the number of positions; their stages take equal times.
        micro_batches: of a step.
        virtual_stages: the number of stages on each position.

    Example:
        >>> bubble(4, 8), bubble(4, 8, 2)
        (0.375, 0.1875)
    """
    return (stages - 1) / (virtual_stages * micro_batches)
