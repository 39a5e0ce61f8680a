"""Micro-batches that overlap: `TrainStep.open`, under the Trainer and under `Lite.step`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.errors import PluginError
from stratagem.strategies import MicroBatch, SingleDeviceStrategy, TrainStep


class Overlapping(SingleDeviceStrategy):
    """Runs all forwards of a step, then all backwards, and ends micro-batches in an order."""

    opens_micro_batches = True
    ends_reversed = False

    def train_step(self, prepared: Any, step: TrainStep, micro_batches: Any) -> None:
        opened = [step.open(each) for each in micro_batches]
        losses = [each.loss() for each in opened]
        for each, loss in zip(opened, losses, strict=True):
            if loss is not None:
                each.before_backward(loss)
                self.backward(prepared, loss / len(losses))
                each.after_backward()
        for each in reversed(opened) if self.ends_reversed else opened:
            each.end()
        self.finish_step(prepared, step)


class Reversed(Overlapping):
    ends_reversed = True


class Net(Module):
    """Notes the hooks of each batch, and logs a value of it in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.seen.append(("step", batch_idx))
        loss = self.layer(batch).square().mean()
        self.log("forward", batch.sum(), on_step=False, on_epoch=True)
        return {"loss": loss, "of": batch_idx}

    def on_after_backward(self) -> None:
        self.log("backward", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Weighs(Net):
    def loss_weight(self, batch: Tensor) -> int:
        return len(batch)


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        """The number of steps at the end of each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append(("start", batch_idx, batch.sum().item()))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        module.seen.append(("backward", trainer.run.step.batch_idx, loss.item()))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert outputs["loss"] is None or not outputs["loss"].requires_grad
        module.seen.append(("end", batch_idx, batch.sum().item(), outputs.get("of")))
        self.steps.append(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.seen.append(("epoch", trainer.run.step.last_batch_idx))


def batches() -> list[Tensor]:
    """Return ten batches of different lengths; the last step of three has one of them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1 + index % 3, 2, generator=generator) for index in range(10)]


class Batches(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return len(batches())

    def __getitem__(self, index: int) -> Tensor:
        return batches()[index]


def fitted(strategy: SingleDeviceStrategy, model: Net, **arguments: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=arguments.pop("callbacks", None) or Notes(),
        accumulate_grad_batches=3,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(model, DataLoader(Batches(), batch_size=None))
    return trainer


@pytest.mark.parametrize("kind", [Net, Weighs])
@pytest.mark.parametrize("overlapping", [Overlapping, Reversed])
def test_overlapping_micro_batches_train_and_log_as_consecutive_ones(
    kind: type[Net], overlapping: type[Overlapping]
) -> None:
    expected, model = kind(), kind()
    reference = fitted(SingleDeviceStrategy(), expected, gradient_clip_val=0.5)
    trainer = fitted(overlapping(), model, gradient_clip_val=0.5)
    assert torch.equal(model.layer.weight, expected.layer.weight)
    assert trainer.callback_metrics == reference.callback_metrics
    assert trainer.global_step == reference.global_step == 8
    # The batch, the outputs and the loss in each hook are those of the micro-batch of its index.
    assert set(model.seen) == set(expected.seen)


def test_hooks_follow_the_order_in_which_micro_batches_overlap() -> None:
    model, notes = Net(), Notes()
    fitted(Reversed(), model, limit_train_batches=3, callbacks=notes)
    order = [(name, index) for name, index, *_ in model.seen[: len(model.seen) // 2]]
    pairs = [(name, index) for name in ("start", "step", "backward") for index in range(3)]
    assert order == [*pairs, ("end", 2), ("end", 1), ("end", 0), ("epoch", 2)]
    # The hooks of the micro-batch that ends last are called after the optimizer step.
    assert notes.steps == [0, 0, 1, 1, 1, 2]


def test_lite_steps_over_overlapping_micro_batches_as_over_consecutive_ones() -> None:
    def trained(strategy: SingleDeviceStrategy, weights: list[float] | None) -> list[Tensor]:
        lite = Lite(accelerator="cpu", strategy=strategy)
        lite.launch()
        net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(net.weight)
        model, _ = lite.setup(net, SGD(net.parameters(), lr=0.1))

        def loss(batch: Tensor) -> Tensor:
            return model(batch).square().mean()  # type: ignore[no-any-return]

        losses = [lite.step(model, batches()[:3], loss, weights=weights) for _ in range(3)]
        return [net.weight.detach(), *(each for each in losses if each is not None)]

    for weights in (None, [1.0, 2.0, 0.0]):
        expected = trained(SingleDeviceStrategy(), weights)
        assert len(expected) == 4
        for strategy in (Overlapping(), Reversed()):
            assert all(map(torch.equal, trained(strategy, weights), expected))


class Waits(SingleDeviceStrategy):
    """Opens a micro-batch, and leaves it or uses it after its end."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use

    def train_step(self, prepared: Any, step: TrainStep, micro_batches: Any) -> None:
        opened: list[MicroBatch] = [step.open(each) for each in micro_batches]
        for each in opened[1:]:
            each.end()
        if self.use == "twice":
            opened[1].end()


def test_an_opened_micro_batch_ends_once() -> None:
    with pytest.raises(PluginError) as caught:
        fitted(Waits("twice"), Net())
    assert str(caught.value) == ("the micro-batch has ended: call end() after all other work on it")
    with pytest.raises(PluginError, match="has ended 2 of 3 micro-batches; expected a call of"):
        fitted(Waits("never"), Net())


def test_a_front_end_without_a_state_of_micro_batches_needs_no_override() -> None:
    calls: list[Any] = []

    class Plain(TrainStep):
        def begin(self, micro_batch: int) -> int:
            calls.append(("begin", micro_batch))
            return 10 * micro_batch

        def loss(self, part: int, *, converted: bool = False) -> None:
            calls.append(("loss", part, converted))

        def end(self, micro_batch: int) -> None:
            calls.append(("end", micro_batch))

    step = Plain()
    first, second = (step.open(each) for each in (1, 2))
    assert (first.batch, second.batch) == (10, 20)
    first.loss()
    second.loss(21)
    second.end()
    first.end()
    assert step.current is None
    assert calls == [
        ("begin", 1),
        ("begin", 2),
        ("loss", 10, True),
        ("loss", 21, True),
        ("end", 2),
        ("end", 1),
    ]
