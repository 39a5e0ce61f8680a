"""Warnings at the start of a run, of what is valid and often a mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from stratagem_lightning.api.demos.boring_classes import BoringModel, RandomDataset
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities.warnings import PossibleUserWarning


def quick(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        **{"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize(
    ("missing", "category", "message"),
    [
        ("validation_step", UserWarning, "You passed in a `val_dataloader` but have no `valid"),
        ("val_dataloader", PossibleUserWarning, "You defined a `validation_step` but have no `val"),
    ],
)
def test_validation_step_without_loader_or_loader_without_step_warns(
    missing: str, category: type[Warning], message: str
) -> None:
    model = BoringModel()
    setattr(model, missing, None)
    with pytest.warns(category, match=message):
        quick().fit(model)


def test_fit_without_max_epochs_warns() -> None:
    class Stops(BoringModel):
        def on_train_start(self) -> None:
            self.trainer.should_stop = True

    with pytest.warns(PossibleUserWarning, match="`max_epochs` was not set"):
        quick(max_epochs=None).fit(Stops())
    for limit in ({"max_epochs": 1000}, {"max_steps": 1}, {"max_time": "00:00:10:00"}):
        quick(**{"max_epochs": None, **limit}).fit(Stops())


def test_modules_in_eval_mode_at_the_start_warn() -> None:
    model = BoringModel()
    model.frozen = torch.nn.Dropout().eval()
    with pytest.warns(PossibleUserWarning, match=r"Found 1 module\(s\) in eval mode at the start"):
        quick().fit(model)
    # All of them are set to training mode.
    quick().fit(BoringModel().eval())


def test_shuffled_val_dataloader_warns() -> None:
    loader = DataLoader(RandomDataset(32, 4), shuffle=True)
    with pytest.warns(PossibleUserWarning, match="Your `val_dataloader`'s sampler has shuffling"):
        quick().validate(BoringModel(), loader)
    with warnings.catch_warnings():
        quick().fit(BoringModel(), loader)


class Sized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(4, 32))

    def __len__(self) -> int:
        return 4


def test_iterable_dataset_with_len_warns() -> None:
    with pytest.warns(UserWarning, match="Your `IterableDataset` has `__len__` defined"):
        quick().test(BoringModel(), DataLoader(Sized()))


def test_log_with_logger_true_without_a_logger_warns() -> None:
    class Logs(BoringModel):
        asked: bool | None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0, logger=self.asked)
            return super().training_step(batch, batch_idx)

    model = Logs()
    model.asked = True
    with pytest.warns(UserWarning, match=r"log\('a', ..., logger=True\)` but have no logger conf"):
        quick().fit(model)
    model.asked = None
    quick().fit(model)
