"""Saver: what runs in a process that saves one numbered checkpoint after another."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem import Lite
from stratagem.checkpoint import CheckpointIO, Shards
from stratagem.discovery import ComponentSpec, get_registry
from stratagem.errors import CheckpointError
from stratagem.runtime import CheckpointWriter
from stratagem_testing.child import Report
from stratagem_testing.durability.faults import Break
from stratagem_testing.places import find, is_place

NAME = "model.ckpt"


@dataclass(frozen=True)
class Subject:
    """The format that is tested.

    Attributes:
        format: name of a checkpoint format, or the place of a class or function that makes one.
        asynchronous: whether it writes in the background.
        megabytes: size of a checkpoint.
    """

    format: str
    asynchronous: bool
    megabytes: float

    def make(self) -> CheckpointIO:
        """Build it, as a Trainer would."""
        io = self._own()
        if self.asynchronous and not io.asynchronous:
            io = self._find("async").build(inner=io)
        return io

    def _own(self) -> CheckpointIO:
        io: CheckpointIO = (
            find(self.format)() if is_place(self.format) else self._find(self.format).build()
        )
        return io

    @property
    def needs_async(self) -> bool:
        """Whether a front end is to let it write in the background, which it does not by itself."""
        return self.asynchronous and not self._own().asynchronous

    @property
    def given(self) -> Any:
        """The value that a front end receives: the name, or a new format."""
        return find(self.format)() if is_place(self.format) else self.format

    @staticmethod
    def _find(name: str) -> ComponentSpec:
        return get_registry().find("checkpoint_io", name).spec


class Model:
    """Tensors of random numbers, plus the number of the step.

    The tensors change in place, as in training, so that a save without a snapshot mixes numbers.
    The numbers are random, as weights are, since a format that compresses would make regular
    numbers much smaller.

    Args:
        megabytes: the total size of the tensors.
        rank, world_size: the part to save, if the format takes shards.
    """

    def __init__(self, megabytes: float, rank: int = 0, world_size: int = 1) -> None:
        rows = max(4, int(megabytes * 2**20 / 4 / 256 / 8))
        self.tensors = {f"layer{i}.weight": torch.empty(rows, 256) for i in range(8)}
        self.tensors.update({f"layer{i}.bias": torch.empty(256) for i in range(8)})
        self.tensors["scalar"] = torch.empty(())
        self.train(0)
        self.rank, self.world_size = rank, world_size

    def train(self, number: int) -> None:
        """Become another step's."""
        for name, tensor in self.tensors.items():
            tensor.copy_(_random(name, tensor.shape)).add_(number)

    def checkpoint(self, number: int, *, shards: bool) -> dict[str, Any]:
        """Return the checkpoint that is saved."""
        state: dict[str, Any] = dict(self.tensors)
        if shards:
            state = {name: self._shards(tensor) for name, tensor in self.tensors.items()}
        return {"number": number, "state_dict": state, "text": f"step {number}"}

    def _shards(self, tensor: Tensor) -> Shards:
        size = tensor.numel()
        start, end = (size * (self.rank + i) // self.world_size for i in (0, 1))
        return Shards.of_flat(tensor.shape, tensor.flatten()[start:end], start=start)


def _random(name: str, shape: torch.Size) -> Tensor:
    """Return whole numbers, to which float32 adds the number of a step exactly."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(1 << 22, shape, generator=generator).float()


def numbers_of(name: str, tensor: Tensor) -> tuple[float, float]:
    """Return the least and the largest number of a step that a tensor of a model has."""
    numbers = tensor - _random(name, tensor.shape)
    return float(numbers.min()), float(numbers.max())


def save_for_ever(subject: Subject, folder: Path, report: Report) -> None:
    """Save 1, 2, 3 ... to one path; report which save is begun, and which is durable."""
    io = subject.make()
    model = Model(subject.megabytes)
    _save_for_ever(
        model,
        lambda checkpoint: io.save_checkpoint(checkpoint, folder / NAME),
        io.wait,
        report,
        asynchronous=subject.asynchronous,
        shards=io.supports_shards,
    )


def _save_for_ever(
    model: Model,
    save: Callable[[dict[str, Any]], None],
    wait: Callable[[], None],
    report: Report,
    *,
    asynchronous: bool,
    shards: bool,
) -> None:
    for number in itertools.count(1):
        model.train(number)
        report(begun=number)
        save(model.checkpoint(number, shards=shards))
        if number == 1:
            wait()
        # At most one is in flight: the one before is durable.
        report(durable=number - 1 if asynchronous and number > 1 else number)


def save_on_two_ranks(subject: Subject, folder: Path, report: Report) -> None:
    """Do as `save_for_ever` does, on two ranks together; report their processes' ids."""
    lite = Lite(
        accelerator="cpu",
        strategy="ddp_fork",
        devices=2,
        plugins=subject.given,
        async_save=subject.needs_async,
    )
    lite.launch(_save_on_rank, subject, folder, report)


def _save_on_rank(lite: Lite, subject: Subject, folder: Path, report: Report) -> None:
    io = lite.strategy.checkpoint_io
    writer = CheckpointWriter(lite.ranks, io)
    report(rank=lite.global_rank, pid=os.getpid())
    _save_for_ever(
        Model(subject.megabytes, lite.global_rank, lite.world_size),
        lambda checkpoint: writer.save(checkpoint, folder / NAME),
        writer.finish,
        report if lite.is_global_zero else _report_nothing,
        asynchronous=subject.asynchronous,
        shards=io.supports_shards,
    )


def _report_nothing(**what: Any) -> None:
    pass


def save_twice(subject: Subject, folder: Path, break_disk: Break, report: Report) -> None:
    """Save 1, break the disk, save 2; report whether that was refused, and whether it broke."""
    io = subject.make()
    model = Model(subject.megabytes)
    model.train(1)
    io.save_checkpoint(model.checkpoint(1, shards=io.supports_shards), folder / NAME)
    io.wait()
    report(durable=1)
    model.train(2)
    broke = break_disk()
    try:
        io.save_checkpoint(model.checkpoint(2, shards=io.supports_shards), folder / NAME)
        io.wait()
    except (OSError, CheckpointError) as error:
        report(refused=f"{type(error).__name__}: {error}")
    except Exception as error:  # a library's own, which front ends do not expect
        report(other=f"{type(error).__name__}: {error}")
    else:
        report(saved=2)
    report(broke=broke(), end=True)
