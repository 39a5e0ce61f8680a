"""memory_report: what would fit on a device whose memory is full."""

from __future__ import annotations

from stratagem.discovery import StrategySpec
from stratagem.strategies import StepMemory
from stratagem_extras.memory_report import what_would_fit


def spec(name: str, shards: tuple[str, ...] = (), offloads: tuple[str, ...] = ()) -> StrategySpec:
    return StrategySpec(name=name, target="m:C", api_version=1, shards=shards, offloads=offloads)


WHOLE = ("parameters", "gradients", "optimizer")
SPECS = (
    spec("plain"),
    spec("optimizer_only", ("optimizer",)),
    spec("whole", WHOLE),
    spec("whole_again", WHOLE),
    spec("host", (), WHOLE),
)
GIB = 2**30
NEED = StepMemory(
    parameters=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, buffers=0, working=4 * GIB
)


def test_memory_remedies_name_each_kind_of_sharding_once() -> None:
    assert what_would_fit(NEED, 10 * GIB, SPECS, ranks=4) == [
        "strategy='whole' with devices=4: about 8.00 GiB",
        "strategy='host' with devices=4: about 4.00 GiB",
    ]
    assert what_would_fit(NEED, 14 * GIB, SPECS, ranks=4)[0].startswith("strategy='optimizer_only'")


def test_on_one_device_only_offloading_and_smaller_batches_help() -> None:
    assert what_would_fit(NEED, 17 * GIB, SPECS, ranks=1, micro_batches=3) == [
        "strategy='host': about 4.00 GiB",
        "a batch of 1/4 the size with accumulate_grad_batches=12: about 17.00 GiB",
    ]
    assert what_would_fit(NEED, 3 * GIB, SPECS, ranks=1) == []
