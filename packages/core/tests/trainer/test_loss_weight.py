"""`Module.loss_weight`: the mean over all elements of a step, resumed, refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import Ranks, SingleDeviceStrategy
from stratagem.trainer import StepPolicy
from stratagem.trainer.step.loss_weight import LossWeights, check_loss_weight


class Net(Module):
    """Its loss is a mean over the elements that are not NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(1, 1)
        self.weighed: list[int] = []

    def loss_weight(self, batch: Tensor) -> Any:
        self.weighed.append(len(batch))
        return batch.isfinite().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.layer(batch[batch.isfinite()].unsqueeze(1)) - 1).square().mean()
        self.log("loss", loss, on_epoch=True, batch_size=int(batch.isfinite().sum()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*counts: int) -> Any:
    """Batches of six numbers, of which this many are finite."""
    values = torch.linspace(-1, 1, 6 * len(counts)).reshape(len(counts), 6)
    hidden = torch.arange(6) >= torch.tensor(counts).unsqueeze(1)
    return list(values.masked_fill(hidden, math.nan))


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": bool(callbacks), "logger": False, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def mean_over_elements(steps: list[list[Tensor]]) -> Tensor:
    net = Net()
    optimizer = net.configure_optimizers()
    for step in steps:
        optimizer.zero_grad()
        values = torch.cat(step)
        (net.layer(values[values.isfinite()].unsqueeze(1)) - 1).square().mean().backward()
        optimizer.step()
    return net.layer.weight.detach()


def test_loss_weight_gives_the_mean_over_the_elements_of_a_step() -> None:
    data, net = batches(6, 1, 0, 3, 5), Net()
    run = trainer(accumulate_grad_batches=2)
    run.fit(net, DataLoader(data, batch_size=None))
    expected = mean_over_elements([data[:2], data[2:4], data[4:]])
    torch.testing.assert_close(net.layer.weight.detach(), expected, rtol=0, atol=1e-7)
    assert run.callback_metrics["loss_epoch"].isfinite()
    assert net.weighed == [6] * 5


def test_a_step_without_any_element_has_gradients_of_zero() -> None:
    net = Net()
    before = net.layer.weight.detach().clone()
    run = trainer(detect_anomaly=True)
    run.fit(net, DataLoader(batches(0), batch_size=None))
    assert torch.equal(net.layer.weight, before)
    assert run.global_step == 1


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_with_loss_weight_resumes_within_an_epoch(step: int, tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(5)
        return DataLoader(batches(6, 1, 2, 3, 5, 4), batch_size=None, shuffle=True)

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    whole, saved, resumed = Net(), Net(), Net()
    trainer(**options).fit(whole, loader())
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(saver, **options).fit(saved, loader())
    trainer(**options).fit(resumed, loader(), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_policy_and_names_of_users_leave_losses_unweighted() -> None:
    class Plain(Trainer):
        policy = StepPolicy(weighs_losses=False)

    class Named(Module):
        """Has a parameter of this name."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(1, 1)
            self.loss_weight = nn.Parameter(torch.ones(()))

        training_step = Net.training_step
        configure_optimizers = Net.configure_optimizers

    data: Any = DataLoader(batches(6, 3), batch_size=None)
    options: Any = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    unweighted, named = Net(), Named()
    Plain(accelerator="cpu", devices=1, **options).fit(unweighted, data)
    trainer().fit(named, data)
    assert unweighted.weighed == []
    assert torch.equal(unweighted.layer.weight, named.layer.weight)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-1, "-1"), (math.inf, "inf"), (None, "None"), (torch.ones(2), "a tensor of shape (2,)")],
)
def test_a_bad_loss_weight_is_an_error(value: Any, shown: str) -> None:
    class Bad(Net):
        def loss_weight(self, batch: Tensor) -> Any:
            return value

    with pytest.raises(UserCodeError) as error:
        trainer().fit(Bad(), DataLoader(batches(6), batch_size=None))
    assert f"Bad.loss_weight returned {shown}; expected a finite number of at least 0" in str(
        error.value
    )


def test_loss_weight_is_refused_where_it_cannot_be_used() -> None:
    net = Net()
    net.automatic_optimization = False
    with pytest.raises(
        ConfigurationError, match="Net defines loss_weight, which cannot be used: a"
    ):
        trainer().fit(net, DataLoader(batches(6), batch_size=None))


def test_loss_weight_is_refused_by_strategies_that_divide_or_take_whole_steps() -> None:
    class Whole(SingleDeviceStrategy):
        def train_step(self, prepared: Any, step: Any, micro_batches: Any) -> None:
            raise AssertionError("training begins")

    whole = Trainer(accelerator="cpu", strategy=Whole(), max_epochs=1, logger=False)
    with pytest.raises(ConfigurationError, match="the strategy 'Whole' takes each step as a whole"):
        whole.fit(Net(), DataLoader(batches(6), batch_size=None))
    plan = replace(trainer().plan, devices=(0, 1))
    with pytest.raises(ConfigurationError, match=r"over devices\. Remove or rename"):
        check_loss_weight(Net(), SingleDeviceStrategy(), plan)


def test_loss_factors_of_lite_on_one_device() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    assert lite.loss_factors([6, 2, 0]) == [0.75, 0.25, 0.0]
    assert lite.loss_factors([0, 0]) == [0.0, 0.0]


def test_a_batch_that_a_rank_repeats_has_the_weight_of_zero() -> None:
    weights = LossWeights(Net(), Ranks())
    assert weights(batches(6, 3), [2.0, 0.0]) == [2.0, 0.0]
    assert weights(batches(6, 2), None) == [1.5, 0.5]
