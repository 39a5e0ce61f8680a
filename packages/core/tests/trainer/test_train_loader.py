"""The micro-batches of a step: read one at a time, and counted right."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from stratagem import Callback, Module, Trainer
from stratagem.data.resume.resumable_sampler import has_exact_length
from stratagem.trainer.loaders.train_loader import MicroBatches


class Counted(Dataset[Tensor]):
    """Batches of its own; notes how many of them were alive whenever the next one was read."""

    def __init__(self, count: int = 12, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.held: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.fails_at:
            raise OSError("the disk is gone")
        self.held.append(len(self.alive))
        batch = torch.full((2, 3), float(index + 1))
        self.alive.add(batch)
        return batch


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: Counted) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[index] for index in range(len(self.batches)))


class Overestimates(Sampler[int]):
    """Yields fewer indices than its length says, as samplers of a length by tokens do."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=1e-3)


def fit(loader: Any, accumulate: int, **options: Any) -> Net:
    model = Net()
    options = {"enable_checkpointing": False, "logger": False, "max_epochs": 2, **options}
    trainer = Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        accumulate_grad_batches=accumulate,
        **options,
    )
    trainer.fit(model, loader)
    return model


def raw(batches: list[Tensor], accumulate: int, epochs: int = 2) -> nn.Module:
    model = Net()
    optimizer = SGD(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            for batch in window:
                (model.training_step(batch, 0) / len(window)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return model


def loader_of(data: Any, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(data, batch_size=None, **options)


@pytest.mark.parametrize("accumulate", [1, 6])
def test_no_more_batches_are_held_with_accumulation_than_without(accumulate: int) -> None:
    data = Counted(12)
    fit(loader_of(data), accumulate)
    # The one before is held by the loop, as in a raw one.
    assert max(data.held) <= 1


def test_batches_of_unknown_number_are_read_before_the_step_and_let_go_within() -> None:
    data = Counted(12)
    fit(loader_of(Stream(data)), 6)
    assert max(data.held) <= 6
    data = Counted(12)
    fit(loader_of(data, sampler=Overestimates(12, 12)), 6)
    assert max(data.held) <= 6


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda data: loader_of(data), 11),
        (lambda data: loader_of(Stream(data)), 11),
        (lambda data: loader_of(data, sampler=Overestimates(8, 11)), 8),
        (lambda data: [data[index] for index in range(11)], 11),
        (lambda data: iter_of(data), 11),
    ],
    ids=["known", "stream", "overestimated", "list", "iterable"],
)
@pytest.mark.filterwarnings("ignore:.*yielded 8 batches, but its length promised 11")
def test_last_accumulated_step_averages_over_its_batches(
    make: Callable[[Counted], Any], read: int
) -> None:
    model = fit(make(Counted(11)), 3)
    expected = raw([torch.full((2, 3), float(index + 1)) for index in range(read)], 3)
    torch.testing.assert_close(model.net.weight, expected.net.weight, rtol=0, atol=0)  # type: ignore[union-attr]


class iter_of:
    """An iterable of batches that knows no length."""

    def __init__(self, data: Counted) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return (self.data[index] for index in range(len(self.data)))


def test_limit_train_batches_within_a_step_reads_no_further_batch() -> None:
    data = Counted(12)
    model = fit(loader_of(data), 3, limit_train_batches=5, max_epochs=1)
    assert len(data.held) == 5
    expected = raw([torch.full((2, 3), float(index + 1)) for index in range(5)], 3, epochs=1)
    torch.testing.assert_close(model.net.weight, expected.net.weight, rtol=0, atol=0)  # type: ignore[union-attr]


def test_an_error_in_reading_a_batch_ends_the_fit_with_that_error(tmp_path: Path) -> None:
    class Fails(Callback):
        within_step: bool | None = None

        def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
            self.within_step = trainer.is_within_step
            assert trainer.global_step == 1

    for fails_at in (3, 4):  # the first batch of the second step, and one in its middle
        fails = Fails()
        with pytest.raises(OSError, match="the disk is gone"):
            fit(loader_of(Counted(12, fails_at=fails_at)), 3, callbacks=fails)
        assert fails.within_step is False


def test_a_fit_resumes_after_whole_steps_with_batches_read_one_at_a_time(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 2 and not trainer.is_within_step:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    def shuffled() -> DataLoader[Tensor]:
        data = Counted(11)
        return loader_of(data, sampler=RandomSampler(data))

    torch.manual_seed(3)
    whole = fit(shuffled(), 3, callbacks=Saves())
    torch.manual_seed(4)
    model = Net()
    trainer = Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        accumulate_grad_batches=3,
        max_epochs=2,
    )
    trainer.fit(model, shuffled(), ckpt_path=tmp_path / "two.ckpt")
    torch.testing.assert_close(model.net.weight, whole.net.weight, rtol=0, atol=0)


class Epochs(Sampler[int]):
    """Notes the epochs that it is given."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("batched", [None, "automatically", "by a sampler"])
def test_a_sampler_is_given_each_epoch_once(batched: str | None) -> None:
    sampler, data = Epochs(), torch.ones(2, 3)
    if batched == "by a sampler":
        loader: DataLoader[Any] = DataLoader(data, batch_sampler=BatchSampler(sampler, 1, False))  # type: ignore[arg-type]
    else:
        loader = DataLoader(data, 1 if batched else None, sampler=sampler)  # type: ignore[arg-type]
    fit(loader, 1)
    assert sampler.epochs == [0, 1]


def test_which_lengths_can_be_relied_on() -> None:
    class Longer(DataLoader[Any]):
        def __len__(self) -> int:
            return 100

    data = Counted(4)
    assert has_exact_length(loader_of(data))
    assert has_exact_length(DataLoader(data, batch_size=3, shuffle=True))
    assert has_exact_length([1, 2])
    assert not has_exact_length(loader_of(Stream(data)))
    assert not has_exact_length(loader_of(data, sampler=Overestimates(2, 4)))
    assert not has_exact_length(Longer(data))
    assert not has_exact_length(iter_of(data))


def test_the_micro_batches_of_a_step_are_counted_and_not_searched() -> None:
    batches = MicroBatches(iter([1, 2]), 2, 0, 2)
    assert len(batches) == 2
    with pytest.raises(TypeError) as caught:
        _ = 1 in batches
    assert str(caught.value) == (
        "the micro-batches of a step can be iterated over once, and not searched"
    )
    assert list(batches) == [1, 2]
