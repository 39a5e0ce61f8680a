"""Accelerators: batches on their way to a device, memory, and errors of devices."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.accelerators import DeviceMemory
from stratagem.data import map_tensors
from stratagem_testing.components.bench import Bench
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.accelerator import devices_of
from stratagem_testing.components.checks.every import pickled

KIND = "accelerator"


class _Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


@dataclass
class _Sample:
    image: Tensor
    label: str


class _Own:
    """What a collate function may return: it moves itself."""

    def __init__(self) -> None:
        self.places: list[Any] = []

    def to(self, device: Any, **_: Any) -> _Own:
        moved = _Own()
        moved.places = [*self.places, device]
        return moved


def _batch(device: torch.device, number: int = 0) -> dict[str, Any]:
    """Return a batch with one of everything that a DataLoader yields and the device can hold."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(6, 8, generator=generator)
    batch: dict[str, Any] = {
        "floats": values,
        "transposed": values.t(),
        "part": values[::2, 1:5],
        "half": values.to(torch.bfloat16),
        "integers": torch.arange(7) + number,
        "flags": values > 0,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5 + number),
        "pair": _Pair(values + 1, [values + 2, values + 3]),
        "nested": ({"deep": [values.sum(0)]}, "text", None, 7, b"bytes", 1.5),
        "ordered": OrderedDict(first=values + 4),
        "sample": _Sample(values + 5, "label"),
    }
    try:
        torch.zeros(1, dtype=torch.float64).to(device)
    except (RuntimeError, TypeError):
        return batch  # Metal has no float64
    return {**batch, "double": values.double()}


def _flat(data: Any) -> list[Any]:
    """Return the leaves of a batch in order."""
    if isinstance(data, dict):
        keys = [leaf for key in data for leaf in [key, *_flat(data[key])]]
        return [type(data).__name__, *keys]
    if isinstance(data, _Sample):
        return [type(data).__name__, *_flat(data.image), *_flat(data.label)]
    if isinstance(data, (list, tuple)):
        return [type(data).__name__, *(leaf for each in data for leaf in _flat(each))]
    return [data]


def _compare(moved: Any, original: Any, device: torch.device) -> None:
    own, expected = _flat(moved), _flat(original)
    assert len(own) == len(expected), (
        f"the mover returned {len(own)} values and containers of {len(expected)}: part of a "
        "nested batch is lost"
    )
    for mine, other in zip(own, expected, strict=True):
        if not isinstance(other, Tensor):
            assert type(mine) is type(other) and mine == other, (  # noqa: PT018
                f"the mover returned {mine!r} for {other!r}"
            )
            continue
        assert isinstance(mine, Tensor), f"the mover returned {mine!r} for a tensor"
        assert mine.device == device, f"a tensor of a batch is on {mine.device}, expected {device}"
        assert mine.dtype is other.dtype, (
            f"the mover returned {mine.dtype} for {other.dtype}: dtypes are the precision's affair"
        )
        assert mine.shape == other.shape, f"the mover returned {mine.shape} for {other.shape}"
        assert torch.equal(mine.cpu(), other), (
            f"the mover changed the values of a tensor of shape {tuple(other.shape)} and "
            f"{other.dtype}: data are lost, or the copy was not waited for"
        )


@check(KIND, "batches/moved", needs_device=True)
def _moved(bench: Bench) -> None:
    """batch_mover moves nested batches, and keeps values, dtypes and containers."""
    accelerator = bench.make()
    for device in devices_of(bench, accelerator):
        accelerator.setup_device(device)
        mover = accelerator.batch_mover(device)
        original = _batch(device)
        _compare(mover(original), _batch(device), device)
        own = mover(_Own())
        assert isinstance(own, _Own) and own.places == [device], (  # noqa: PT018
            "the mover did not call to(device) of a batch that is an object with that method, as a "
            "tokenizer returns it: stratagem.data.move_to_device does"
        )
        assert all(
            leaf.device.type == "cpu" for leaf in _flat(original) if isinstance(leaf, Tensor)
        ), "the mover changed the batch that it was given"


@check(KIND, "batches/in flight", needs_device=True)
def _in_flight(bench: Bench) -> None:
    """Consecutive batches in pinned memory arrive on the device without overwriting each other."""
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    mover = accelerator.batch_mover(device)
    if accelerator.pins_memory:
        pinned = torch.empty(4, pin_memory=True)
        assert pinned.is_pinned(), (
            "pins_memory=True, and torch.empty(4, pin_memory=True) is not pinned: torch needs an "
            "allocator of page-locked memory for the device"
        )
    sums = []
    for number in range(24):
        batch = _batch(device, number)
        if accelerator.pins_memory:
            batch = map_tensors(lambda tensor: tensor.pin_memory(), batch)
        moved = mover(batch)
        del batch  # as a loader does: its memory may be used for the next one
        sums.append((moved["floats"] * 2).sum())
    accelerator.synchronize(device)
    for number, total in enumerate(sums):
        expected = float((_batch(device, number)["floats"] * 2).sum())
        assert abs(float(total) - expected) < 1e-3, (
            f"batch {number} of 24 arrived with the sum {float(total):.5g}, expected "
            f"{expected:.5g}: it was used before its copy was done, or its memory was used again"
        )


@check(KIND, "memory/stats", needs_device=True)
def _stats(bench: Bench) -> None:
    """device_stats returns numbers by name. Numbers of bytes are integers of at least 0.

    The allocated or resident bytes grow with a tensor.
    """
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    before = accelerator.device_stats(device)
    kept = torch.ones(1 << 24, device=device)  # 64 MiB
    after = accelerator.device_stats(device)
    for name, value in after.items():
        assert isinstance(value, (int, float)) and not isinstance(value, bool), (  # noqa: PT018
            f"device_stats()[{name!r}] is {value!r}; expected a number, for the loggers"
        )
        if name.endswith("_bytes"):
            assert isinstance(value, int) and value >= 0, (  # noqa: PT018
                f"device_stats()[{name!r}] is {value!r}; expected a whole number of bytes"
            )
    for name in {"allocated_bytes", "resident_bytes"} & after.keys():
        grown = after[name] - before.get(name, 0)
        assert grown >= kept.numel() * 2, (
            f"{name} grew by {grown} with a tensor of {kept.numel() * 4} bytes: it is another "
            "unit, or another device's"
        )


@check(KIND, "memory/who holds it", needs_device=True)
def _device_memory(bench: Bench) -> None:
    """device_memory returns None, or a DeviceMemory in bytes whose parts add up."""
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    before = accelerator.device_memory(device)
    kept = torch.ones(1 << 24, device=device)  # 64 MiB
    found = accelerator.device_memory(device)
    if found is None:
        return
    assert isinstance(found, DeviceMemory), (
        f"device_memory returned {found!r}; expected DeviceMemory or None"
    )
    told = {"allocated": found.allocated, "peak": found.peak, "reserved": found.reserved}
    for name, value in {**told, "total": found.total or 0, **dict(found.others)}.items():
        assert isinstance(value, int) and value >= 0, (  # noqa: PT018
            f"device_memory has {name}={value!r}; expected bytes, a whole number"
        )
    assert isinstance(before, DeviceMemory), f"device_memory returned {before!r}, and then {found}"
    grown, size = found.allocated - before.allocated, kept.numel() * kept.element_size()
    assert grown > size / 2, (
        f"device_memory has {grown} bytes more allocated with a tensor of {size} bytes: it is "
        "another unit (/proc has KiB), or another device's"
    )
    assert found.peak >= found.allocated, (
        f"device_memory has peak={found.peak} below allocated={found.allocated}"
    )
    if found.total is not None:
        assert max(found.allocated, found.reserved) <= found.total, (
            f"device_memory has {found.allocated} bytes allocated and {found.reserved} reserved of "
            f"a total of {found.total}"
        )
    del kept


@check(KIND, "memory/reading values", needs_device=True)
def _reading(bench: Bench) -> None:
    """start_reading returns the numbers in tensors of one element, for all dtypes."""
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    if accelerator.is_host:
        return  # no copy of existing data is requested
    tensors = [
        torch.tensor(1.5, device=device),
        torch.tensor([7], device=device),
        torch.tensor([[0.25]], device=device, dtype=torch.bfloat16),
        torch.tensor(True, device=device),
    ]
    read = accelerator.start_reading(tensors)
    for tensor in tensors:
        tensor.zero_()  # as the next step does
    numbers = read()
    assert numbers == [1.5, 7.0, 0.25, 1.0], (
        f"start_reading returned a function that returned {numbers}, expected [1.5, 7.0, 0.25, "
        "1.0]: values are those of the moment of the call, in order"
    )


@check(KIND, "errors/out of memory", needs_device=True)
def _out_of_memory(bench: Bench) -> None:
    """is_out_of_memory returns True only for the error of an allocation that does not fit."""
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    error = bench.error(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=device))
    assert error is not None, f"{device} has given 1 PiB: the check cannot tell"
    assert accelerator.is_out_of_memory(error), (
        f"is_out_of_memory is False for what an allocation of 1 PiB raises: "
        f"{type(error).__name__}: {str(error)[:300]}"
    )
    for other in _OTHERS:
        assert not accelerator.is_out_of_memory(other), (
            f"is_out_of_memory is True for {other!r}: the user would be told to save memory"
        )


_OTHERS = (
    ValueError("shapes do not match"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
    RuntimeError("the replay memory is empty"),
    RuntimeError("the device of the labels is out of the list"),
    RuntimeError("index out of range in self"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
)


@check(KIND, "errors/lost device")
def _lost(bench: Bench) -> None:
    """explain_lost_device returns None for errors of user code, and otherwise a sentence."""
    accelerator = bench.make()
    for other in _OTHERS:
        said = accelerator.explain_lost_device(other)
        assert said is None, (
            f"explain_lost_device says {said!r} of {other!r}: nothing would touch the device from "
            "then on"
        )
    told = accelerator.explain_lost_device(torch.AcceleratorError("device-side assert triggered"))
    assert told is None or (isinstance(told, str) and told.strip()), (
        f"explain_lost_device returned {told!r}; expected a sentence, or None"
    )


check(KIND, "life/pickled")(pickled)
