"""Options of the Trainer that users know: overfitting, reloading, measuring; what they read."""

from __future__ import annotations

from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from stratagem import Module, Trainer
from stratagem.callbacks import LambdaCallback, ModelCheckpoint
from stratagem.errors import ConfigurationError
from stratagem.loggers import CSVLogger


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []
        self.made: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read.append((self.current_epoch, batch.tolist()))
        self.log("loss", self.weight.detach())
        return (self.weight - batch.sum() / 10).square()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(count: int, first: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(torch.arange(first, first + count), 2, shuffle=shuffle)  # type: ignore[arg-type]


class Reloading(Net):
    """Has other data in each epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        self.made.append(self.current_epoch)
        return numbers(6, 10 * self.current_epoch)

    def val_dataloader(self) -> DataLoader[Any]:
        return numbers(2, 10 * self.current_epoch, shuffle=False)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    options = {"enable_checkpointing": bool(callbacks), "logger": False, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )


def test_several_may_come_in_a_sequence_of_any_type(tmp_path: Path) -> None:
    class Config(UserList[Any]):
        """What a library that reads configuration files has for a list."""

    callback, logger = LambdaCallback(), CSVLogger(tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=Config([callback]),
        logger=Config([logger]),
    )
    assert trainer.loggers == [logger]
    assert callback in trainer.callbacks
    with pytest.raises(ConfigurationError, match="cpu devices have none: pass a number, such as"):
        Trainer(accelerator="cpu", devices=Config([0, 1]))  # type: ignore[arg-type]


def test_overfitting_reads_the_same_batches_in_order() -> None:
    model = Net()
    one = trainer(overfit_batches=2, max_epochs=2)
    one.fit(model, numbers(10), numbers(10, 50))
    assert [batch for _, batch in model.read] == [[0, 1], [2, 3]] * 2
    assert model.validated == [[50, 51], [52, 53]] * 2
    assert (one.options.limit_train_batches, one.options.limit_val_batches) == (2, 2)
    part = trainer(overfit_batches=0.4, max_epochs=1)
    part.fit(Net(), numbers(10))
    assert part.num_training_batches == 2
    with pytest.raises(ConfigurationError, match=r"overfit_batches=1\.5"):
        trainer(overfit_batches=1.5)


def test_overfit_batches_replaces_a_sampler_by_sequential_order() -> None:
    model, data = Net(), torch.arange(10)
    draws = WeightedRandomSampler([1.0] * 10, 10)
    loader: Any = DataLoader(data, 2, sampler=draws)  # type: ignore[arg-type]
    trainer(overfit_batches=2, max_epochs=2).fit(model, loader)
    assert [batch for _, batch in model.read] == [[0, 1], [2, 3]] * 2


def test_loaders_are_made_anew_after_some_epochs() -> None:
    model = Reloading()
    trainer(reload_dataloaders_every_n_epochs=2, max_epochs=5).fit(model)
    assert model.made == [0, 2, 4]
    assert {(epoch, min(batch) // 10) for epoch, batch in model.read} == {
        *((0, 0), (1, 0), (2, 2), (3, 2), (4, 4)),
    }
    assert [batch[0] // 10 for batch in model.validated] == [0, 0, 2, 2, 4]
    with pytest.raises(ConfigurationError, match="reload_dataloaders_every_n_epochs=-1"):
        trainer(reload_dataloaders_every_n_epochs=-1)


@pytest.mark.parametrize("step", [4, 6, 8, 11])
def test_reload_dataloaders_resumes_exactly(step: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}
    torch.manual_seed(2)
    whole = Reloading()
    trainer(**options).fit(whole)
    torch.manual_seed(2)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1)
    trainer(saver, **options).fit(Reloading())
    (path,) = (p for p in tmp_path.iterdir() if f"step={step}" in p.name)
    resumed = Reloading()
    trainer(**options).fit(resumed, ckpt_path=path)
    assert resumed.read == whole.read[step:]
    assert torch.equal(resumed.weight, whole.weight)
