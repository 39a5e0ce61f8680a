"""`Trainer.policy` changes the loop and the steps; `FitState` is what a checkpoint has of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem import Module, Trainer
from stratagem.checkpoint.forms import find_mismatch
from stratagem.checkpoint.trainer_format import _TRAINING_FORM
from stratagem.errors import ConfigurationError
from stratagem.trainer import FitState, StepPolicy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
}


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append("step")
        return self.weight * batch.mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(("backward", self.weight.grad is not None))

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append("clear")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append("validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Stops(Line):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


def fit(model: Line, policy: StepPolicy, **options: Any) -> Trainer:
    class Other(Trainer):
        pass

    Other.policy = policy
    trainer = Other(**QUIET | options)
    trainer.fit(model, [torch.ones(1)] * 3, [torch.ones(1)])
    return trainer


@pytest.mark.parametrize(("divides", "weight"), [(False, -2.0), (True, -1.5)])
def test_divides_by_window_divides_the_last_step_by_the_whole_window(
    divides: bool, weight: float
) -> None:
    model = Line()
    fit(model, StepPolicy(divides_by_window=divides), accumulate_grad_batches=2)
    assert model.weight.item() == weight


@pytest.mark.parametrize("validates", [False, True])
def test_validates_at_stop_validates_where_a_stop_ends_the_epoch(validates: bool) -> None:
    model = Stops()
    trainer = fit(model, StepPolicy(validates_at_stop=validates))
    assert trainer.global_step == 1
    assert ("validation" in model.seen) is validates


def test_clears_before_backward_keeps_the_gradients_between_two_steps() -> None:
    model = Line()
    fit(model, StepPolicy(clears_before_backward=True), limit_val_batches=0)
    assert model.seen == ["step", "clear", ("backward", False)] * 3
    assert model.weight.grad is not None


def test_a_checkpoint_holds_the_fields_of_a_fit_state_that_its_form_names() -> None:
    state = FitState(epoch=2, batches=3, stop_requests={None}, has_ended_epoch=True)
    saved = state.state_dict()
    form: Any = _TRAINING_FORM["progress"]
    assert {name.removesuffix("?") for name in form} == saved.keys()
    assert find_mismatch(saved, form, "progress") == ""
    again = FitState()
    again.load_state_dict(saved)
    assert again == replace(state, stop_requests=set(), has_ended_epoch=False)
    assert str(again) == "epoch 2, step 0"


@pytest.mark.parametrize("policy", [StepPolicy, {"validates_at_stop": True}])
def test_a_policy_of_another_type_is_refused(policy: Any) -> None:
    kind: Any = type("Own", (Trainer,), {"policy": policy})
    with pytest.raises(ConfigurationError, match=r"Own\.policy is .*: expected an object, such as"):
        kind(**QUIET)
