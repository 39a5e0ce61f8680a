"""Runs that train along with others: their part of the data, and joining in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.strategies import PreparedModel, Ranks, SingleDeviceStrategy, TrainStep


class Replica(SingleDeviceStrategy):
    """One of several runs; hands over a checkpoint at the beginning of a step, or takes one."""

    def __init__(
        self,
        part: tuple[int, int],
        *,
        hands_over_at: int = -1,
        joins: dict[str, Any] | None = None,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        self.part = part
        self.hands_over_at = hands_over_at
        self.joins = joins
        self.steps = 0
        self.handed_over: dict[str, Any] = {}

    def make_ranks(self) -> Ranks:
        ranks = super().make_ranks()
        ranks.run_split = self.part
        return ranks

    def adopt_peer_state(
        self, prepared: PreparedModel, checkpoint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        self._checkpoint = checkpoint
        return self.joins

    def train_step(self, prepared: PreparedModel, step: TrainStep, micro_batches: Any) -> None:
        if self.steps == self.hands_over_at:
            self.handed_over = copy.deepcopy(self._checkpoint())
        self.steps += 1
        super().train_step(prepared, step, micro_batches)


class Seeing(Module):
    """Notes which samples it saw, and how many it evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []
        self.evaluated: list[float] = []
        self.checked = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        loss = mse_loss(self.layer(batch / 100), batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluated += batch.flatten().tolist()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fit(strategy: Replica, **options: Any) -> tuple[Seeing, Trainer]:
    data: Any = torch.arange(24.0).reshape(-1, 1)
    model = Seeing()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(model, DataLoader(data, 2, shuffle=True), DataLoader(data, 4))
    return model, trainer


def test_joined_runs_split_training_data_only() -> None:
    runs = [fit(Replica((part, 3))) for part in range(3)]
    parts = [model.seen for model, _ in runs]
    assert sorted(sample for part in parts for sample in part) == list(range(24))
    assert [len(part) for part in parts] == [8, 8, 8]
    # After the sanity check of two batches.
    assert all(model.evaluated[8:] == list(range(24)) for model, _ in runs)
    assert runs[1][1].ranks.data_split == (1, 3)
    assert runs[1][1].ranks.eval_split == (0, 1)


def test_a_run_joins_another_in_the_middle_of_an_epoch_as_if_from_a_checkpoint() -> None:
    first = Replica((0, 2), hands_over_at=3)
    going_on, others = fit(first)
    joining, trainer = fit(Replica((1, 2), joins=first.handed_over))
    alone, _ = fit(Replica((1, 2)))
    assert trainer.global_step == others.global_step == 6
    # Where the others are in their part of the data, it goes on in its own.
    assert joining.seen == alone.seen[6:]
    assert not set(joining.seen) & set(going_on.seen)
    assert len(joining.evaluated) == 24, "a run that goes on from others checks nothing first"


def test_a_run_that_joins_has_weights_and_optimizer_of_the_others() -> None:
    first = Replica((0, 1), hands_over_at=5)
    one, _ = fit(first)
    other, _ = fit(Replica((0, 1), joins=first.handed_over))
    assert one.layer.weight.item() != 0
    assert torch.equal(one.layer.weight, other.layer.weight)
    assert other.seen == one.seen[10:]
