"""The order of passes in a step, and its times."""

from __future__ import annotations

import pytest

from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.schedule import SCHEDULES, Action, actions, timeline

EVERY = [
    (schedule, positions, virtual)
    for schedule in SCHEDULES
    for positions in range(1, 9)
    for virtual in ((2, 3, 4) if schedule == "interleaved" else (1,))
]
MICRO_BATCHES = range(1, 18)


@pytest.mark.parametrize(("schedule", "positions", "virtual"), EVERY)
def test_each_stage_runs_each_micro_batch_once_in_order(
    schedule: str, positions: int, virtual: int
) -> None:
    for micro_batches in MICRO_BATCHES:
        orders = actions(schedule, positions, virtual, micro_batches)
        assert len(orders) == positions
        for position, order in enumerate(orders):
            passes: dict[tuple[str, int], list[int]] = {}
            for action in order:
                passes.setdefault((action.kind, action.stage), []).append(action.micro_batch)
            stages = range(position, positions * virtual, positions)
            kinds = "forward", "backward"
            assert passes == {(k, s): list(range(micro_batches)) for k in kinds for s in stages}


@pytest.mark.parametrize(("schedule", "positions", "virtual"), EVERY)
def test_a_step_takes_the_time_of_the_formula(schedule: str, positions: int, virtual: int) -> None:
    stages = positions * virtual
    for micro_batches in MICRO_BATCHES:
        orders = actions(schedule, positions, virtual, micro_batches)
        step = timeline(orders, [1.0] * stages, [2.0] * stages)
        if virtual == 1 or micro_batches >= positions:
            busy = virtual * micro_batches
            assert step.time == 3 * (busy + positions - 1)
            assert step.bubble == pytest.approx((positions - 1) / (busy + positions - 1))
        else:
            # No order is faster: the last micro-batch passes all stages.
            assert step.time == 3 * (stages + micro_batches - 1)


@pytest.mark.parametrize(("schedule", "positions", "virtual"), EVERY)
def test_micro_batches_in_flight_are_bounded(schedule: str, positions: int, virtual: int) -> None:
    stages = positions * virtual
    for micro_batches in MICRO_BATCHES:
        orders = actions(schedule, positions, virtual, micro_batches)
        step = timeline(orders, [1.0] * stages, [2.0] * stages)
        whole = micro_batches * virtual
        for position, held in enumerate(step.in_flight):
            after = positions - position - 1
            if schedule == "gpipe":
                assert held == whole
            elif schedule == "1f1b":
                assert held == min(whole, after + 1)
            else:
                group = max(-(-micro_batches // max(micro_batches // positions, 1)), positions)
                assert held <= min(whole, 2 * after + (virtual - 1) * group + 1)


def test_a_transfer_delays_the_reader_on_another_position() -> None:
    orders = actions("gpipe", 2, 1, 1)
    step = timeline(orders, [1.0, 1.0], [2.0, 2.0], transfer=0.5)
    assert [(span.start, span.end) for span in step.spans[0]] == [(0, 1), (5, 7)]
    assert [(span.start, span.end) for span in step.spans[1]] == [(1.5, 2.5), (2.5, 4.5)]
    on_one = timeline(actions("interleaved", 1, 2, 1), [1.0] * 2, [2.0] * 2, transfer=0.5)
    assert on_one.time == 6


def test_the_slowest_stage_decides_the_time_of_a_step() -> None:
    step = timeline(actions("1f1b", 2, 1, 4), [1.0, 2.0], [2.0, 4.0])
    assert step.time == 1 + 4 * 6 + 2


def test_an_order_that_cannot_be_met_is_refused() -> None:
    orders = [
        [Action("backward", 0, 0), Action("forward", 0, 0)],
        [Action("forward", 1, 0), Action("backward", 1, 0)],
    ]
    with pytest.raises(ConfigurationError) as caught:
        timeline(orders, [1.0] * 2, [2.0] * 2)
    assert str(caught.value) == (
        "the backward of stage 0, micro-batch 0, waits for ever for the forward of stage 0, "
        "micro-batch 0: expected an order of actions in which each comes after those that it needs"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ("zb", 2, 1, 4),
            'schedule=\'zb\': expected "gpipe", "1f1b" or "interleaved", as a string',
        ),
        (
            ("interleaved", 2, 1, 4),
            'schedule="interleaved" with virtual_stages=1: expected several stages on each rank. '
            'Write virtual_stages=2, or schedule="1f1b"',
        ),
        (
            ("1f1b", 2, 2, 4),
            'schedule="1f1b" with virtual_stages=2: expected one stage on each rank. '
            'Write schedule="interleaved", or virtual_stages=1',
        ),
        (("1f1b", 0, 1, 4), "pipeline=0: expected a number of at least 1"),
        (("1f1b", 2, 0, 4), "virtual_stages=0: expected a number of at least 1"),
        (("1f1b", 2, 1, 0), "micro_batches=0: expected a number of at least 1"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(
    sizes: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        actions(*sizes)
    assert str(caught.value) == message
