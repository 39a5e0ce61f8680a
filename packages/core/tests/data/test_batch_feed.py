"""A Trainer's subclass chooses the step of a fit, and how batches reach the other steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.errors import UserCodeError
from stratagem.trainer import BatchFeed, EndOfEpoch, Step, StepContext

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
}


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[str, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("step", batch))
        return batch

    def on_validation_batch_start(self, *given: Any) -> None:
        self.seen.append(("start", given[1]))

    def on_validation_batch_end(self, outputs: Any, *given: Any) -> None:
        self.seen.append(("end", outputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(6, 1), batch_size=2)  # type: ignore[arg-type]


class Reads(Line):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(("run", "step"), [("fit", "training"), ("validate", "validation")])
def test_dataloader_iter_argument_is_refused_with_the_package_to_install(
    run: str, step: str
) -> None:
    trainer = Trainer(**QUIET, num_sanity_val_steps=0)
    with pytest.raises(UserCodeError) as caught:
        getattr(trainer, run)(Reads(), loader())
    said = str(caught.value)
    assert said.startswith(f"Reads.{step}_step takes dataloader_iter, which only the Trainer of")
    assert "`pip install stratagem-lightning`" in said
    assert "\n" not in said


class Numbers(BatchFeed):
    """Passes the batch's number only, to the first two batches."""

    def run(self, step: Any) -> Any:
        if self.last[1] == 2:
            raise EndOfEpoch
        return step(self.last[1], 0)


class CountedStep(Step):
    taken = 0

    def finish(self) -> None:
        CountedStep.taken += 1
        super().finish()


class OwnSteps(Trainer):
    def make_train_step(self, context: StepContext) -> Step:
        return CountedStep(context)

    def make_batch_feed(
        self, step: Any, batches: Iterator[tuple[Any, int, int]], count: float, takes: int
    ) -> BatchFeed:
        assert (step.__name__, count, takes) == ("validation_step", 3, 2)
        return Numbers(batches, takes)


def test_a_subclass_decides_how_batches_reach_a_step() -> None:
    model = Line()
    OwnSteps(**QUIET, num_sanity_val_steps=0).fit(model, loader(), loader())
    assert CountedStep.taken == 3
    assert model.seen == [
        *(("start", 0), ("step", 0), ("end", 0)),
        *(("start", 1), ("step", 1), ("end", 1)),
        ("start", 2),
    ]
