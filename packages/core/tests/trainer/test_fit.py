"""The training loop: its numbers are those of a raw PyTorch loop, its events come in one order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stratagem import Callback, DataModule, Lite, Module, Trainer, seed_everything
from stratagem.callbacks import EarlyStopping
from stratagem.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    NonFiniteLossError,
    UserCodeError,
)
from stratagem.plan.step_options import GradientClip
from stratagem.precision import TruePrecision
from stratagem.runtime.prepare import release
from stratagem.trainer.context import RunState
from stratagem.trainer.hooks import HOOKS

Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.02)


def data(samples: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin() * 3)


def loader(samples: int = 44, batch_size: int = 4) -> DataLoader[Batch]:
    return DataLoader(data(samples), batch_size=batch_size)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


class Regression(Module):
    def __init__(self, make_optimizer: MakeOptimizer = sgd) -> None:
        super().__init__()
        self.net = network()
        self.make_optimizer = make_optimizer
        self.trained_on: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trained_on.append(batch_idx)
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", mse_loss(self.net(inputs), targets))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def quiet(**arguments: Any) -> Trainer:
    """A Trainer that writes nothing and says nothing."""
    arguments = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        **arguments,
    }
    return Trainer(**arguments)


def raw_fit(
    make_optimizer: MakeOptimizer,
    *,
    epochs: int = 2,
    accumulate: int = 1,
    clip: Callable[[nn.Module], object] | None = None,
    dtype: torch.dtype = torch.float32,
    context: Callable[[], Any] = contextlib.nullcontext,
    batches: Any = None,
) -> nn.Module:
    net = network().to(dtype)
    optimizer = make_optimizer(net.parameters())
    all_batches = list(loader() if batches is None else batches)
    for _ in range(epochs):
        for first in range(0, len(all_batches), accumulate):
            window = all_batches[first : first + accumulate]
            for inputs, targets in window:
                with context():
                    loss = mse_loss(net(inputs.to(dtype)), targets.to(dtype))
                (loss / len(window)).backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                clip(net)
            optimizer.step()
            optimizer.zero_grad()
    return net


def first_weight(net: nn.Module) -> Tensor:
    return next(net.parameters())


def gradient_of(net: nn.Module) -> Tensor:
    gradient = first_weight(net).grad
    assert gradient is not None
    return gradient.clone()


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), (_, wanted) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert value.dtype == wanted.dtype, name
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=name)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_fit_ends_with_the_weights_of_a_raw_loop(make_optimizer: MakeOptimizer) -> None:
    model = Regression(make_optimizer)
    quiet(max_epochs=3).fit(model, loader(), loader(10))
    assert_same_weights(model.net, raw_fit(make_optimizer, epochs=3))


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_accumulation_takes_the_mean_over_a_window_and_over_the_shorter_last_one(
    make_optimizer: MakeOptimizer,
) -> None:
    model = Regression(make_optimizer)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3)
    trainer.fit(model, loader())
    assert trainer.global_step == 2 * 4  # 11 batches: 3, 3, 3 and 2
    assert_same_weights(model.net, raw_fit(make_optimizer, accumulate=3))


def test_accumulation_by_epoch_takes_the_latest_entry_that_has_begun() -> None:
    trainer = quiet(max_epochs=4, accumulate_grad_batches={0: 11, 2: 3}, limit_train_batches=6)
    steps: list[int] = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            steps.append(trainer.global_step)

    trainer.callbacks.append(Count())
    trainer.fit(Regression(), loader())
    assert steps == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("algorithm", "value", "clip"),
    [
        ("norm", 0.5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.5)),
        ("value", 0.05, lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.05)),
    ],
)
def test_clipping_equals_torchs_own(
    algorithm: str, value: float, clip: Callable[[nn.Module], object]
) -> None:
    model = Regression()
    quiet(
        max_epochs=2,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=2,
    ).fit(model, loader())
    expected = raw_fit(sgd, accumulate=2, clip=clip)
    assert_same_weights(model.net, expected)
    unclipped = raw_fit(sgd, accumulate=2)
    assert not torch.equal(first_weight(unclipped), first_weight(expected))


@pytest.mark.parametrize(
    ("precision", "dtype", "context"),
    [
        ("64-true", torch.float64, contextlib.nullcontext),
        ("bf16-true", torch.bfloat16, contextlib.nullcontext),
        ("16-true", torch.float16, contextlib.nullcontext),
        ("bf16-mixed", torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
        ("bf16", torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
        (64, torch.float64, contextlib.nullcontext),
    ],
)
def test_a_precision_equals_the_same_formats_by_hand(
    precision: Any, dtype: torch.dtype, context: Callable[[], Any]
) -> None:
    model = Regression()
    quiet(max_epochs=2, precision=precision).fit(model, loader(), loader(8))
    expected = raw_fit(sgd, dtype=dtype, context=context)
    assert_same_weights(model.net, expected)
    assert not torch.equal(
        first_weight(expected).float(),
        first_weight(raw_fit(sgd)),
    )


@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-true"])
def test_a_precision_leaves_complex_numbers_whole(precision: str) -> None:
    class Rotates(Regression):
        angle: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angle", torch.tensor([1 + 2j]))

    model = Rotates()
    quiet(max_epochs=1, precision=precision, limit_train_batches=1).fit(model, loader())
    assert model.angle.tolist() == [1 + 2j]
    assert first_weight(model.net).dtype.itemsize == int(precision[:2].replace("bf", "16")) // 8


LOST = (
    r"AdamW\(eps=1e-08\) divides by 0 where a gradient is 0 or small: its parameters are in "
    r"torch\.float16, in which 1e-08 is 0, and weights become infinite or not a number\. Pass "
    r"eps=1e-4, or precision='bf16-true', which has the range of float32"
)


class AdamRegression(Regression):
    eps = 1e-8

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=self.eps)


def test_float16_epsilon_underflow_warns() -> None:
    """float16 has nothing between 0 and 6e-8: 0 divided by 0 where a gradient is 0."""
    model = AdamRegression()
    with pytest.warns(UserWarning, match=LOST) as told:
        quiet(max_epochs=1, precision="16-true").fit(model, loader())
    assert len(told) == 1
    assert not first_weight(model.net).isfinite().all()  # what is warned of


@pytest.mark.parametrize(("eps", "precision"), [(1e-4, "16-true"), (1e-8, "bf16-true")])
def test_an_epsilon_that_the_dtype_has_is_nothing_to_tell(eps: float, precision: str) -> None:
    model = AdamRegression()
    model.eps = eps
    quiet(max_epochs=1, precision=precision).fit(model, loader())
    assert first_weight(model.net).isfinite().all()


def test_lite_tells_of_a_lost_epsilon_too() -> None:
    lite = Lite(accelerator="cpu", precision="16-true")
    lite.launch()
    model = lite.setup(nn.Linear(2, 1))
    with pytest.warns(UserWarning, match=LOST):
        lite.setup_optimizers(torch.optim.AdamW(model.parameters()))
    fused = torch.optim.AdamW(model.parameters(), fused=True)  # which computes in float32
    lite.setup_optimizers(fused)


def test_a_batch_is_skipped_where_training_step_returns_none() -> None:
    class Skipping(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else {"loss": loss, "more": 1}

    model = Skipping()
    trainer = quiet(max_epochs=1)
    trainer.fit(model, loader(32))
    assert trainer.global_step == 4
    assert_same_weights(model.net, raw_fit(sgd, epochs=1, batches=list(loader(32))[::2]))


@pytest.mark.filterwarnings("ignore:Empty.training_step returned None for the first batch")
def test_a_fit_that_nothing_would_end_is_ended() -> None:
    class Empty(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return None

    with pytest.raises(UserCodeError, match=r"returned None for all 4 batches of an epoch"):
        quiet(max_epochs=-1, max_steps=2).fit(Empty(), loader(16))
    trainer = quiet(max_epochs=2, max_steps=2)
    text = (
        r"Empty.training_step returned None for all 4 batches of an epoch, so nothing was "
        r"optimized: end the method with `return loss`"
    )
    with pytest.warns(UserWarning, match=text):
        trainer.fit(Empty(), loader(16))
    assert (trainer.current_epoch, trainer.global_step) == (2, 0)


def test_epoch_with_overflow_in_every_step_warns_and_continues() -> None:
    class Overflows(TruePrecision):
        scales_loss = True
        steps = 0

        def optimizer_step(self, optimizer: Optimizer, **options: Any) -> None:
            self.steps += 1
            self.step_was_skipped = self.steps <= 5

    trainer = quiet(max_epochs=-1, max_steps=2, plugins=Overflows("32-true"))
    with pytest.warns(UserWarning, match="overflowed") as warned:
        trainer.fit(Regression(), loader(16))
    assert [str(one.message) for one in warned] == [
        "the gradients of all steps in an epoch of 4 batches overflowed, so loss scaling skipped "
        "the steps and nothing was optimized. The scale falls with each; if it does not help, "
        "look for NaN with detect_anomaly=True, or pass precision='bf16-mixed'"
    ]
    assert (trainer.current_epoch, trainer.global_step) == (1, 2)


def test_training_step_may_take_the_batch_alone() -> None:
    class Short(Regression):
        def training_step(self, batch: Batch) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    model = Short()
    quiet(max_epochs=1).fit(model, loader())
    assert_same_weights(model.net, raw_fit(sgd, epochs=1))


def test_sanity_check_and_validation_leave_the_order_of_training_data_alone() -> None:
    orders = []
    for sanity in (0, 2):
        torch.manual_seed(3)
        model = Regression()
        seen: list[Tensor] = []

        class See(Callback):
            def __init__(self, seen: list[Tensor]) -> None:
                self.seen = seen

            def on_train_batch_start(
                self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
            ) -> None:
                self.seen.append(batch[0])

        shuffled = DataLoader(data(), batch_size=4, shuffle=True)
        quiet(max_epochs=1, num_sanity_val_steps=sanity, callbacks=See(seen)).fit(
            model, shuffled, DataLoader(data(8), batch_size=4, shuffle=True)
        )
        orders.append(torch.cat(seen))
    assert torch.equal(orders[0], orders[1])


def test_the_sanity_check_draws_from_no_random_numbers_of_training() -> None:
    numpy = pytest.importorskip("numpy")

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    class Draws(Regression):
        def on_train_start(self) -> None:
            self.drawn = draw()

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            draw()

    drawn = []
    for sanity in (0, 1, 2):
        seed_everything(11)
        model = Draws()
        quiet(max_epochs=1, num_sanity_val_steps=sanity).fit(model, loader(), loader(8))
        drawn.append(model.drawn)
    assert drawn[0] == drawn[1] == drawn[2]


def test_training_uses_a_tensor_that_validation_computed_first() -> None:
    class Caches(Regression):
        scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:  # as rotary embeddings and masks are kept
                self.scale = torch.full((x.shape[1],), 2.0)
            scaled: Tensor = self.net(x * self.scale)
            return scaled

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self(batch[0])

    model = Caches()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    quiet(max_epochs=1, num_sanity_val_steps=1).fit(model, loader(), loader(8))
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert any(changed)


def test_a_training_step_without_a_return_is_warned_of_once() -> None:
    class Forgets(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[return]
            super().training_step(batch, batch_idx)

    text = "Forgets.training_step returned None for "
    with pytest.warns(UserWarning, match=text) as warned:
        quiet(max_epochs=2).fit(Forgets(), loader())
    first, *epochs = [str(one.message).removeprefix(text) for one in warned]
    assert first.startswith("the first batch, which skips it: ")
    assert "End the method with `return loss`" in first
    assert len(set(epochs)) == 1
    assert epochs[0].startswith("all 11 batches of an epoch")


# ---------------------------------------------------------------- how long, and how much


def test_max_steps_stops_in_the_middle_of_an_epoch() -> None:
    model = Regression()
    trainer = quiet(max_steps=15)
    trainer.fit(model, loader())
    assert trainer.global_step == 15
    assert trainer.current_epoch == 1
    assert model.trained_on == [*range(11), *range(4)]
    assert_same_weights(model.net, raw_fit(sgd, epochs=1, batches=[*loader(), *list(loader())[:4]]))


def test_the_earlier_of_max_steps_and_max_epochs_ends_training() -> None:
    by_epochs = quiet(max_epochs=1, max_steps=100)
    by_epochs.fit(Regression(), loader())
    assert (by_epochs.current_epoch, by_epochs.global_step) == (1, 11)
    by_steps = quiet(max_epochs=100, max_steps=11)
    by_steps.fit(Regression(), loader())
    assert (by_steps.current_epoch, by_steps.global_step) == (1, 11)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


def test_should_stop_ends_training_after_the_step() -> None:
    trainer = quiet(max_epochs=10, callbacks=StopAt(5))
    trainer.fit(Regression(), loader())
    assert trainer.global_step == 5


def test_should_stop_waits_for_min_epochs_and_min_steps() -> None:
    by_epochs = quiet(max_epochs=10, min_epochs=3, callbacks=StopAt(5))
    by_epochs.fit(Regression(), loader())
    assert by_epochs.global_step == 33
    by_steps = quiet(max_epochs=10, min_steps=14, callbacks=StopAt(5))
    by_steps.fit(Regression(), loader())
    assert by_steps.global_step == 14


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("01:02:03:04", 93784.0),
        (timedelta(minutes=2), 120.0),
        ({"hours": 1, "minutes": 30}, 5400.0),
        (90, 90.0),
        (0.5, 0.5),
    ],
)
def test_max_time_takes_a_timedelta_a_string_a_dict_or_seconds(given: Any, seconds: float) -> None:
    assert quiet(max_time=given).options.max_time == seconds


def test_max_time_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            nonlocal now
            now += 2.0
            return super().training_step(batch, batch_idx)

    clock_of_runs = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("stratagem.trainer.loops.interruption.time", clock_of_runs)
    trainer = quiet(max_time=9)
    trainer.fit(Slow(), loader())
    assert trainer.global_step == 5


class Counting(Module):
    """Counts the batches of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 1))
        self.counts = {"train": 0, "val": 0, "test": 0, "predict": 0}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.counts["train"] += 1
        return (batch[0] @ self.weight).square().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.counts["val"] += 1

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.counts["test"] += 1

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.counts["predict"] += 1
        return batch[0]

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("limit", "train", "val"),
    [(None, 11, 6), (3, 3, 3), (100, 11, 6), (0.5, 5, 3), (1.0, 11, 6), (1, 1, 1)],
)
def test_limits_are_numbers_of_batches_or_fractions(
    limit: int | float | None, train: int, val: int
) -> None:
    model = Counting()
    trainer = quiet(
        max_epochs=2,
        num_sanity_val_steps=0,
        limit_train_batches=limit,
        limit_val_batches=limit,
        limit_test_batches=limit,
        limit_predict_batches=limit,
    )
    trainer.fit(model, loader(), loader(24))
    trainer.test(model, loader(24), verbose=False)
    predictions = trainer.predict(model, loader(24))
    assert model.counts == {"train": 2 * train, "val": 2 * val, "test": val, "predict": val}
    assert len(predictions) == val


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_of_0_leaves_training_or_evaluation_out(limit: int | float) -> None:
    model = Counting()
    trainer = quiet(max_epochs=2, limit_val_batches=limit)
    trainer.fit(model, loader(), loader(24))
    assert model.counts["val"] == 0
    assert model.counts["train"] == 22
    none = quiet(max_epochs=2, limit_train_batches=limit)
    none.fit(model, loader(), loader(24))
    assert model.counts["train"] == 22
    assert none.global_step == 0
    assert quiet(limit_test_batches=limit).test(model, loader(24), verbose=False) == [{}]
    assert quiet(limit_predict_batches=limit).predict(model, loader(24)) == []


def test_return_predictions_false_keeps_no_predictions() -> None:
    class Alive:
        now = most = 0

        def __init__(self) -> None:
            Alive.now += 1
            Alive.most = max(Alive.most, Alive.now)

        def __del__(self) -> None:
            Alive.now -= 1

    class Predicts(Regression):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return Alive()

    assert quiet().predict(Predicts(), loader(24), return_predictions=False) is None
    assert Alive.most == 1


def test_a_model_may_prepare_data_once_a_node_before_anything_else() -> None:
    called: list[str] = []

    class Downloads(Regression):
        def prepare_data(self) -> None:
            called.append("prepare")

        def train_dataloader(self) -> Any:
            called.append("loader")
            return loader(8)

    quiet(max_epochs=1).fit(Downloads())
    assert called == ["prepare", "loader"]


@pytest.mark.parametrize(("fast", "batches"), [(True, 1), (3, 3)])
def test_fast_dev_run_runs_a_few_batches_of_everything_and_writes_nothing(
    fast: bool | int, batches: int, tmp_path: Path
) -> None:
    model = Counting()
    trainer = Trainer(
        fast_dev_run=fast,
        max_epochs=100,
        val_check_interval=2,
        check_val_every_n_epoch=7,
        accelerator="cpu",
        default_root_dir=tmp_path,
    )
    trainer.fit(model, loader(), loader(24))
    trainer.test(model, loader(24), verbose=False)
    trainer.predict(model, loader(24))
    assert model.counts == dict.fromkeys(model.counts, batches)
    assert list(tmp_path.iterdir()) == []
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_model_path == ""
    with pytest.raises(CheckpointNotFoundError, match="since a fast_dev_run saves none"):
        trainer.test(model, loader(24), ckpt_path="best")
    assert list(tmp_path.iterdir()) == []


def test_batch_of_none_is_skipped_with_a_warning() -> None:
    batches = [None, torch.ones(2, 2), None, torch.ones(2, 2)]

    class Sums(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.read: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.read.append(batch_idx)
            loss: Tensor = self.layer(batch).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model, trainer = Sums(), quiet(max_epochs=1)
    with pytest.warns(UserWarning, match="train_dataloader yielded None: the batch is skipped"):
        trainer.fit(model, batches)
    assert model.read == [1, 3]
    assert trainer.global_step == 2


def test_a_second_fit_begins_at_the_first_epoch() -> None:
    trainer = quiet(max_epochs=2)
    first, second = Regression(), Regression()
    trainer.fit(first, loader())
    trainer.fit(second, loader())
    assert_same_weights(second.net, first.net)
    assert (trainer.current_epoch, trainer.global_step) == (2, 22)


def test_second_fit_of_a_model_prints_its_start_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer, model = quiet(max_epochs=2), Regression()
    trainer.fit(model, loader())
    assert capsys.readouterr().err == ""
    trainer.fit(model, loader())
    assert capsys.readouterr().err.startswith(
        "stratagem: fit() of the same model again: epochs and steps are counted from 0 and "
    )
    assert_same_weights(model.net, raw_fits_twice())


def raw_fits_twice() -> nn.Module:
    """A loop of two epochs, and another one with a new optimizer."""
    net = network()
    for _ in range(2):
        optimizer = sgd(net.parameters())
        for _ in range(2):
            for inputs, targets in loader():
                optimizer.zero_grad()
                mse_loss(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return net


def test_a_value_of_the_fit_before_ends_no_other() -> None:
    class Silent(Regression):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            pass

    trainer = quiet(max_epochs=2, callbacks=EarlyStopping("val_loss", patience=1))
    trainer.fit(Regression(), loader(8), loader(8))
    assert "val_loss" in trainer.callback_metrics
    with pytest.raises(UserCodeError, match="no value of that name was logged; there is nothing"):
        trainer.fit(Silent(), loader(8), loader(8))


class Endless(IterableDataset[Batch]):
    """Samples without a number of them."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Batch]:
        return iter([data()[index] for index in range(self.samples)])


def test_data_without_a_length_are_read_to_their_end() -> None:
    model = Regression()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3)
    trainer.fit(model, DataLoader(Endless(44), batch_size=4), DataLoader(Endless(8), batch_size=4))
    assert trainer.global_step == 8
    assert trainer.num_training_batches == float("inf")
    assert_same_weights(model.net, raw_fit(sgd, accumulate=3))
    assert "val_loss" in trainer.callback_metrics


def test_any_iterable_of_batches_is_a_loader() -> None:
    model = Regression()
    quiet(max_epochs=2).fit(model, list(loader()))
    assert_same_weights(model.net, raw_fit(sgd))


# ---------------------------------------------------------------- optimizers and schedulers


class Configured(Regression):
    """Returns from configure_optimizers what a function makes; keeps the learning rates."""

    def __init__(self, configure: Callable[[Optimizer], Any]) -> None:
        super().__init__()
        self.configure = configure
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.configure(SGD(self.parameters(), lr=0.1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def step_lr(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize(
    ("configure", "by_epoch"),
    [
        (lambda o: o, [1.0, 1.0]),
        (lambda o: [o], [1.0, 1.0]),
        (lambda o: (o,), [1.0, 1.0]),
        (lambda o: ([o], [step_lr(o)]), [1.0, 0.5]),
        (lambda o: ([o], [{"scheduler": step_lr(o), "frequency": 2}]), [1.0, 1.0]),
        (lambda o: {"optimizer": o}, [1.0, 1.0]),
        (lambda o: {"optimizer": o, "lr_scheduler": step_lr(o)}, [1.0, 0.5]),
        # A monitor means nothing to a scheduler that is not stepped with a value.
        (lambda o: {"optimizer": o, "lr_scheduler": step_lr(o), "monitor": "x"}, [1.0, 0.5]),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {"scheduler": step_lr(o), "name": "lr", "strict": True},
            },
            [1.0, 0.5],
        ),
        (lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": step_lr(o)}}], [1.0, 0.5]),
    ],
)
def test_configure_optimizers_may_return_any_of_the_documented_forms(
    configure: Callable[[Optimizer], Any], by_epoch: list[float]
) -> None:
    model = Configured(configure)
    quiet(max_epochs=2, limit_train_batches=2).fit(model, loader())
    assert model.rates == [0.1 * factor for factor in by_epoch for _ in range(2)]


def test_a_scheduler_by_step_steps_after_each_optimizer_step() -> None:
    model = Configured(
        lambda o: {
            "optimizer": o,
            "lr_scheduler": {
                "scheduler": ExponentialLR(o, 0.9),
                "interval": "step",
                "frequency": 2,
            },
        }
    )
    quiet(max_epochs=2, accumulate_grad_batches=2, limit_train_batches=6).fit(model, loader())
    steps = [step for step in range(6) for _ in range(2)]
    assert model.rates == pytest.approx([0.1 * 0.9 ** (step // 2) for step in steps])


def test_schedulers_train_as_in_a_raw_loop() -> None:
    model = Configured(lambda o: ([o], [step_lr(o)]))
    quiet(max_epochs=3).fit(model, loader(), loader(8))
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = step_lr(optimizer)
    for _ in range(3):
        for inputs, targets in loader():
            optimizer.zero_grad()
            mse_loss(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step()
    assert_same_weights(model.net, net)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize("monitor", ["val_value", "train_value"])
def test_reduce_on_plateau_steps_with_the_epochs_value(monitor: str) -> None:
    class Scripted(Configured):
        values = (3.0, 2.0, 2.5, 1.0, 1.5)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.log("train_value", self.values[self.current_epoch], on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("val_value", self.values[self.current_epoch])

    model = Scripted(lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": monitor})
    quiet(max_epochs=5, limit_train_batches=1).fit(model, loader(), loader(4))
    assert model.rates == [0.1, 0.1, 0.1, 0.05, 0.05]


def test_reduce_on_plateau_waits_for_the_epochs_that_have_validation() -> None:
    class Constant(Configured):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("val_value", 1.0)

    model = Constant(
        lambda o: {
            "optimizer": o,
            "lr_scheduler": {"scheduler": plateau(o), "monitor": "val_value"},
        }
    )
    quiet(
        max_epochs=6, limit_train_batches=1, check_val_every_n_epoch=2, num_sanity_val_steps=0
    ).fit(model, loader(), loader(4))
    # Values come after epochs 1, 3 and 5; the second is no better than the first.
    assert model.rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize("named", [True, False])
def test_manual_optimization_steps_its_schedulers_itself(named: bool) -> None:
    class Manual(Configured):
        automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            self.log("train_value", 1.0, on_step=False, on_epoch=True)
            self.manual_backward(loss)
            self.optimizers().step()

        def on_train_epoch_end(self) -> None:
            for _ in range(steps):
                self.lr_schedulers().step(1.0)

    steps = 0
    monitor = {"monitor": "train_value"} if named else {}

    def configured(optimizer: Optimizer) -> Any:
        return [optimizer], [{"scheduler": plateau(optimizer), **monitor}]

    model = Manual(configured)
    quiet(max_epochs=4, limit_train_batches=1).fit(model, loader())
    assert model.rates == [0.1] * 4
    steps = 1
    model = Manual(configured)
    quiet(max_epochs=4, limit_train_batches=1).fit(model, loader())
    assert model.rates == [0.1, 0.1, 0.05, 0.025]


def test_none_leaves_an_option_at_its_default() -> None:
    given: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "gradient_clip_algorithm", "deterministic")
    )
    given.update(num_sanity_val_steps=None, log_every_n_steps=None, precision=None, strategy=None)
    trainer = Trainer(accelerator="cpu", logger=False, gradient_clip_val=0.5, **given)
    assert trainer.checkpoint_callback is not None
    assert len(trainer.callbacks) == 2
    assert trainer.options.step_options.clip == GradientClip(0.5, "norm")
    assert (trainer.options.num_sanity_val_steps, trainer.options.log_every_n_steps) == (2, 1)
    predicted = quiet().predict(Regression(), [data().tensors[0]] * 3, None, None)
    assert len(predicted) == 3


def test_a_checkpoint_may_stand_where_the_datamodule_would(tmp_path: Path) -> None:
    trainer, model = quiet(max_epochs=1), Regression()
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(tmp_path / "fitted.ckpt")
    other: Any = Regression()
    paths: list[Any] = [tmp_path / "fitted.ckpt", str(tmp_path / "fitted.ckpt")]
    for path in paths:
        nn.init.zeros_(first_weight(other.net))
        quiet().validate(other, loader(8), path, verbose=False)
        assert_same_weights(other.net, model.net)
    wrong: Any = 7
    with pytest.raises(ConfigurationError, match=r"datamodule=7: expected a stratagem\.DataModule"):
        quiet().validate(model, loader(8), wrong)


class Momentless(SGD):
    """An optimizer whose step takes the loss, as some adjust the learning rate by it."""

    losses: list[float]

    def step(self, closure: Any = None, *, loss: Tensor | None = None) -> Any:
        if loss is not None:
            self.losses.append(loss.item())
        return super().step(closure)


def momentless(parameters: Any) -> Optimizer:
    optimizer = Momentless(parameters, lr=0.1)
    optimizer.losses = []
    return optimizer


@pytest.mark.parametrize("scheduled", [False, True])
def test_further_arguments_of_a_step_reach_the_optimizer(scheduled: bool) -> None:
    class Manual(Regression):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            self.optimizer = self.make_optimizer(self.parameters())
            if not scheduled:
                return self.optimizer
            return [self.optimizer], [StepLR(self.optimizer, 100)]

        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step(**({"loss": loss} if batch_idx < 2 else {}))

    model = Manual(momentless)
    trainer = quiet(max_epochs=1, limit_train_batches=3)
    trainer.fit(model, loader())
    assert trainer.global_step == 3
    assert isinstance(model.optimizer, Momentless)
    assert len(model.optimizer.losses) == 2
    assert "step" not in vars(model.optimizer) or scheduled


def test_an_engine_takes_no_further_arguments_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = Lite(accelerator="cpu")
    net, optimizer = lite.setup((net := nn.Linear(5, 1)), momentless(net.parameters()))
    loss = net(torch.ones(2, 5)).sum()
    lite.backward(loss)
    capabilities = replace(lite.strategy.capabilities, engine_steps=True)
    monkeypatch.setattr(lite.strategy, "capabilities", capabilities)
    with pytest.raises(ConfigurationError) as raised:
        optimizer.step(loss=loss)
    assert str(raised.value) == (
        "Momentless.step() received loss, but the engine of SingleDeviceStrategy takes this step "
        "and passes no arguments on: call step() without them, or choose another strategy"
    )


def test_an_engine_takes_no_further_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = Lite(accelerator="cpu")
    capabilities = replace(lite.strategy.capabilities, engine_steps=True)
    monkeypatch.setattr(lite.strategy, "capabilities", capabilities)
    plain = nn.Linear(5, 1)
    of_user = sgd(plain.parameters())
    _, optimizer = lite.setup(plain, of_user)
    for each in (of_user, optimizer):
        with pytest.raises(ConfigurationError) as raised:
            each.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert str(raised.value) == (
            "add_param_group: the engine of SingleDeviceStrategy trains the parameters that the "
            "optimizer had when it was set up, and no others: give the optimizer all parameter "
            "groups at once, and freeze those that are not to train yet with requires_grad_(False)"
        )
    release(plain)
    of_user.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(of_user.param_groups) == 2


def test_manual_optimization_of_two_networks_equals_a_raw_loop() -> None:
    def networks() -> tuple[nn.Module, nn.Module]:
        return network(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def losses(
        generator: nn.Module, critic: nn.Module, batch: Batch
    ) -> Iterator[tuple[int, Tensor]]:
        inputs, targets = batch
        yield 0, critic(generator(inputs).detach()).mean() - critic(targets).mean()
        yield 1, -critic(generator(inputs)).mean()

    class Adversaries(Module):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.generator, self.critic = networks()
            self.rates: list[float] = []

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            optimizers = self.optimizers()
            for which, loss in losses(self.generator, self.critic, batch):
                optimizers[which].zero_grad()
                self.manual_backward(loss)
                optimizers[which].step()
            self.log("loss", loss)
            if batch_idx == 10:
                self.lr_schedulers().step()
            self.rates.append(optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            critic = SGD(self.critic.parameters(), lr=0.01)
            return [critic, Adam(self.generator.parameters(), lr=0.01)], [step_lr(critic)]

    model = Adversaries()
    trainer = quiet(max_epochs=2)
    trainer.fit(model, loader())

    torch.manual_seed(5)
    generator, critic = networks()
    raw = [SGD(critic.parameters(), lr=0.01), Adam(generator.parameters(), lr=0.01)]
    for epoch in range(2):
        # Schedulers are the Module's to step, so the Trainer must not step them as well.
        raw[0].param_groups[0]["lr"] = 0.01 * 0.5**epoch
        for batch in loader():
            for which, loss in losses(generator, critic, batch):
                raw[which].zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                raw[which].step()
    assert trainer.global_step == 2 * 2 * 11
    assert_same_weights(model.generator, generator)
    assert_same_weights(model.critic, critic)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(loss.item())


# ---------------------------------------------------------------- validation


class Marks(Callback):
    """Notes how many batches were trained on at each validation."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self.at.append((trainer.current_epoch, trainer.run.state.batches))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [(0, 11), (1, 11)]),
        ({"val_check_interval": 1.0}, [(0, 11), (1, 11)]),
        ({"val_check_interval": 4}, [(0, 4), (0, 8), (1, 4), (1, 8)]),
        ({"val_check_interval": 11}, [(0, 11), (1, 11)]),
        ({"val_check_interval": 0.5}, [(e, b) for e in (0, 1) for b in (5, 10)]),
        (
            # Windows end after 3, 6, 9 and 11 batches: validation comes after the window in which
            # it is due.
            {"val_check_interval": 4, "accumulate_grad_batches": 3},
            [(e, b) for e in (0, 1) for b in (6, 9)],
        ),
        ({"check_val_every_n_epoch": 2}, [(1, 11)]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 5}, [(1, 5), (1, 10)]),
        ({"limit_train_batches": 1}, [(0, 1), (1, 1)]),
    ],
)
def test_val_check_interval_sets_the_steps_of_validation(
    arguments: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    marks = Marks()
    quiet(max_epochs=2, callbacks=marks, **arguments).fit(Regression(), loader(), loader(8))
    assert marks.at == expected


def test_the_sanity_check_runs_a_few_batches_before_training_and_leaves_no_value() -> None:
    for steps, batches in ((0, 0), (2, 2), (100, 6), (-1, 6)):
        model = Counting()
        events: list[str] = []

        class See(Callback):
            def __init__(self, events: list[str], model: Counting) -> None:
                self.events, self.model = events, model

            def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
                self.events.append(f"{self.model.counts['val']} {dict(trainer.callback_metrics)}")

        quiet(max_epochs=1, num_sanity_val_steps=steps, callbacks=See(events, model)).fit(
            model, loader(), loader(24)
        )
        assert events == ([f"{batches} {{}}"] if steps else [])
        assert model.counts["val"] == batches + 6


class TwoSets(Regression):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, targets = batch
        self.log("val_loss", mse_loss(self.net(inputs), targets))
        self.log("same", 7.0 + dataloader_idx, add_dataloader_idx=dataloader_idx == 0)

    test_step = validation_step


def test_several_validation_loaders_have_suffixed_metrics() -> None:
    model = TwoSets()
    trainer = quiet(max_epochs=1)
    first, second = loader(10), loader(6, batch_size=3)
    trainer.fit(model, loader(), [first, second])
    with torch.no_grad():
        losses = [mse_loss(model.net(d.tensors[0]), d.tensors[1]) for d in (data(10), data(6))]
    values = trainer.callback_metrics
    assert values["val_loss/dataloader_idx_0"] == pytest.approx(float(losses[0]))
    assert values["val_loss/dataloader_idx_1"] == pytest.approx(float(losses[1]))
    assert "val_loss" not in values

    returned = trainer.test(model, {"a": first, "b": second}, verbose=False)
    assert len(returned) == 2
    assert returned[0]["val_loss/dataloader_idx_0"] == pytest.approx(float(losses[0]))
    assert returned[1]["val_loss/dataloader_idx_1"] == pytest.approx(float(losses[1]))
    assert "val_loss/dataloader_idx_1" not in returned[0]


def test_evaluation_gives_each_submodule_its_own_mode_back() -> None:
    seen: list[tuple[bool, ...]] = []

    class Partly(Regression):
        def state(self) -> tuple[bool, ...]:
            return (
                self.training,
                self.net.training,
                self.net[0].training,
                self.net[1].training,
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
            )

        def on_train_start(self) -> None:
            self.net[1].eval()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            seen.append(self.state())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            seen.append(self.state())

    model = Partly()
    quiet(max_epochs=1, limit_train_batches=2, val_check_interval=1, num_sanity_val_steps=1).fit(
        model, loader(), loader(4)
    )
    training = (True, True, True, False, True, False)
    evaluating = (False, False, False, False, False, False)
    assert seen == [evaluating, training, evaluating, training, evaluating]

    seen.clear()
    model.train()
    model.net[0].eval()
    quiet(inference_mode=False).validate(model, loader(4), verbose=False)
    assert seen == [(False, False, False, False, False, False)]
    assert [part.training for part in model.modules()] == [True, True, False, True, True]


def test_modes_and_gradients_come_back_after_an_error_in_validation() -> None:
    class Failing(Regression):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            raise ValueError("in the middle of validation")

    model = Failing()
    with pytest.raises(ValueError, match="in the middle"):
        quiet(max_epochs=1).fit(model, loader(), loader(4))
    assert model.training
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


# ---------------------------------------------------------------- predict


def test_predict_returns_the_outputs_batch_by_batch() -> None:
    model = Regression()
    expected = [model.net(inputs).detach() for inputs, _ in loader(10)]

    class Predicting(Regression):
        def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0]) + dataloader_idx

    model = Predicting()
    trainer = quiet()
    one = trainer.predict(model, loader(10))
    assert len(one) == 3
    for output, wanted in zip(one, expected, strict=True):
        torch.testing.assert_close(output, wanted)
    two = trainer.predict(model, [loader(10), loader(4)])
    assert [len(outputs) for outputs in two] == [3, 1]
    torch.testing.assert_close(two[1][0], model.net(next(iter(loader(4)))[0]) + 1)
    assert trainer.predict(model, loader(4), return_predictions=False) is None


def test_predict_step_calls_forward_by_default() -> None:
    class Plain(Module):
        def forward(self, batch: Tensor) -> Tensor:
            return batch * 2

    outputs = quiet().predict(Plain(), DataLoader(torch.arange(4.0), batch_size=2))  # type: ignore[arg-type]
    assert [output.tolist() for output in outputs] == [[0.0, 2.0], [4.0, 6.0]]


# ---------------------------------------------------------------- events

_NOT_RECORDED = {"on_save_checkpoint", "on_load_checkpoint", "on_exception"}


def recording_callback(log: list[str], name: str) -> Callback:
    def record(event: str) -> Any:
        def listen(self: Any, trainer: Trainer, module: Module, *args: Any) -> None:
            log.append(f"{name}.{event}")

        return listen

    events = {event: record(event) for event in HOOKS if event not in _NOT_RECORDED}
    return type("Recorder", (Callback,), events)()  # type: ignore[no-any-return]


def recording_module(log: list[str], name: str, base: type[Module]) -> Module:
    def record(event: str) -> Any:
        def listen(self: Any, *args: Any) -> None:
            log.append(f"{name}.{event}")

        return listen

    events = {event: record(event) for event in HOOKS if event not in _NOT_RECORDED}

    def configure_model(self: Any) -> None:
        log.append(f"{name}.configure_model")

    events["configure_model"] = configure_model
    return type("Recorded", (base,), events)()  # type: ignore[no-any-return]


def each(events: Sequence[str]) -> list[str]:
    """Every event reaches the callbacks in their order, then the Module."""
    return [
        f"{who}.{event}"
        for event in events
        for who in (("module",) if event == "configure_model" else ("first", "second", "module"))
    ]


TRAIN_BATCH = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
]
STEP = ["on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"]
VALIDATION = [
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]


def test_the_events_of_fit_come_in_the_documented_order() -> None:
    log: list[str] = []
    model = recording_module(log, "module", Regression)
    trainer = quiet(
        max_epochs=2,
        limit_train_batches=3,
        accumulate_grad_batches=2,
        val_check_interval=2,
        callbacks=[recording_callback(log, "first"), recording_callback(log, "second")],
    )
    trainer.fit(model, loader(), loader(4))
    epoch = [
        "on_train_epoch_start",
        *TRAIN_BATCH,
        "on_train_batch_end",
        *TRAIN_BATCH,
        *STEP,
        *VALIDATION,
        *TRAIN_BATCH,
        *STEP,
        "on_train_epoch_end",
    ]
    assert log == each(
        [
            "setup",
            "configure_model",
            "on_fit_start",
            "on_sanity_check_start",
            *VALIDATION,
            "on_sanity_check_end",
            "on_train_start",
            *epoch,
            *epoch,
            "on_train_end",
            "on_fit_end",
            "teardown",
        ]
    )


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_events_of_an_evaluation_come_in_the_documented_order(stage: str) -> None:
    log: list[str] = []
    what = "validation" if stage == "validate" else stage
    model = recording_module(log, "module", Counting)
    trainer = quiet(callbacks=[recording_callback(log, "first"), recording_callback(log, "second")])
    if stage == "predict":
        trainer.predict(model, loader(4))
    else:
        getattr(trainer, stage)(model, loader(4), verbose=False)
    assert log == each(
        [
            "setup",
            "configure_model",
            f"on_{what}_start",
            f"on_{what}_epoch_start",
            f"on_{what}_batch_start",
            f"on_{what}_batch_end",
            f"on_{what}_epoch_end",
            f"on_{what}_end",
            "teardown",
        ]
    )


def test_callback_events_receive_their_documented_arguments() -> None:
    got: dict[str, Any] = {}

    class See(Callback):
        def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
            got["stage"] = stage

        def on_train_batch_end(
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            got["outputs"], got["batch"], got["index"] = outputs, batch, batch_idx

        def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
            got["loss"] = loss

        def on_before_optimizer_step(
            self, trainer: Trainer, module: Module, optimizer: Optimizer
        ) -> None:
            got["optimizer"] = optimizer
            got["gradient"] = gradient_of(module)

        def on_before_zero_grad(
            self, trainer: Trainer, module: Module, optimizer: Optimizer
        ) -> None:
            got["clipped"] = gradient_of(module)

    model = Regression()
    trainer = quiet(max_steps=1, callbacks=See(), gradient_clip_val=1e-3)
    batches = loader()
    trainer.fit(model, batches)
    assert got["stage"] == "fit"
    assert got["index"] == 0
    assert torch.equal(got["batch"][0], next(iter(batches))[0])
    assert got["outputs"]["loss"] == got["loss"].detach()
    assert got["loss"].requires_grad
    assert not got["outputs"]["loss"].requires_grad
    assert got["optimizer"] is trainer.optimizers[0]
    assert got["gradient"].norm() > 1e-2
    assert got["clipped"].norm() <= 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_there_at_the_end_of_a_batch_and_cost_no_memory_afterwards(
    accumulate: int,
) -> None:
    stepped: list[Tensor] = []
    seen: list[Tensor] = []
    left: list[bool] = []

    class See(Callback):
        def on_before_zero_grad(
            self, trainer: Trainer, module: Module, optimizer: Optimizer
        ) -> None:
            stepped.append(gradient_of(module))

        def on_train_batch_start(
            self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx % accumulate == 0:
                left.append(any(p.grad is not None for p in module.parameters()))

        def on_train_batch_end(
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if (batch_idx + 1) % accumulate == 0:
                seen.append(gradient_of(module))

        def on_validation_start(self, trainer: Trainer, module: Module) -> None:
            left.append(any(p.grad is not None for p in module.parameters()))

    trainer = quiet(
        max_epochs=1,
        limit_train_batches=2 * accumulate,
        callbacks=See(),
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
    )
    trainer.fit(Regression(), loader(), loader())
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])
    assert all(map(torch.equal, seen, stepped))
    assert left == [False, False, False]


def test_on_exception_receives_the_raised_exception() -> None:
    told: list[BaseException] = []

    class See(Callback):
        def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
            told.append(exception)

    class Failing(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            raise KeyError("mine")

    trainer = quiet(max_epochs=1, callbacks=See())
    with pytest.raises(KeyError, match="mine") as caught:
        trainer.fit(Failing(), loader())
    assert told == [caught.value]
    assert trainer.state.status == "interrupted"


class RunsWithin(Callback):
    """Asks for a run in the middle of another one."""

    def __init__(self, within: str, run: Callable[[Trainer, Module], Any]) -> None:
        self.run = run
        setattr(self, within, self.ask)
        self.raised: list[str] = []

    def ask(self, trainer: Trainer, module: Module, *rest: Any) -> None:
        try:
            self.run(trainer, module)
        except ConfigurationError as error:
            self.raised.append(str(error))


class WithATest(Regression):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


INNER: dict[str, Callable[[Trainer, Module], Any]] = {
    "fit": lambda trainer, module: trainer.fit(module, loader()),
    "validate": lambda trainer, module: trainer.validate(module, loader()),
    "test": lambda trainer, module: trainer.test(module, loader()),
    "predict": lambda trainer, module: trainer.predict(module, loader()),
}


@pytest.mark.parametrize("within", ["on_fit_start", "on_train_batch_end", "on_validation_end"])
@pytest.mark.parametrize("stage", INNER)
def test_a_run_within_a_run_of_the_same_trainer_is_refused_and_changes_nothing(
    stage: str, within: str
) -> None:
    def train(callbacks: list[Callback]) -> tuple[Trainer, Regression]:
        torch.manual_seed(0)
        model = WithATest()
        trainer = quiet(max_epochs=2, callbacks=callbacks)
        trainer.fit(model, loader(), loader())
        return trainer, model

    asks = RunsWithin(within, INNER[stage])
    (trainer, model), (_, undisturbed) = train([asks]), train([])
    assert set(asks.raised) == {
        f"{stage}() was called while fit() of the same Trainer is running: call it after fit() has "
        "returned; to validate while training, pass val_dataloaders to fit() and choose "
        "val_check_interval; for another model, make another Trainer"
    }
    assert trainer.state == RunState("", "finished", "fit")
    for ours, theirs in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trainer.validate(model, loader(), verbose=False)  # and once it has returned, any may follow


def test_another_trainer_may_run_another_model_within_a_run() -> None:
    def other(trainer: Trainer, module: Module) -> None:
        quiet(max_epochs=1).fit(Regression(), loader())

    trainer = quiet(max_epochs=1, callbacks=RunsWithin("on_train_batch_end", other))
    trainer.fit(Regression(), loader(8))
    assert trainer.global_step == len(loader(8))


def test_configure_callbacks_replaces_the_trainers_of_the_same_type() -> None:
    class Mine(Callback):
        pass

    class Other(Callback):
        pass

    own = Mine()

    class Asking(Regression):
        def configure_callbacks(self) -> Any:
            return own

    other = Other()
    trainer = quiet(max_epochs=1, callbacks=[Mine(), other])
    for _ in range(2):
        trainer.fit(Asking(), loader())
        assert trainer.callbacks == [other, own]


# ---------------------------------------------------------------- DataModule and the rest


def test_a_datamodule_is_prepared_set_up_used_and_taken_down() -> None:
    calls: list[str] = []

    class Data(DataModule):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(f"setup {stage}")
            self.data = data()

        def train_dataloader(self) -> Any:
            calls.append("train_dataloader")
            return DataLoader(self.data, batch_size=4)

        def val_dataloader(self) -> Any:
            calls.append("val_dataloader")
            return DataLoader(self.data, batch_size=4)

        def teardown(self, stage: str) -> None:
            calls.append(f"teardown {stage}")

    model, module_data = Regression(), Data()
    trainer = quiet(max_epochs=1)
    trainer.fit(model, module_data)  # in the place of loaders, as well as by name
    assert calls == [
        "prepare_data",
        "setup fit",
        # In the order in which they are read: the sanity check comes first.
        "val_dataloader",
        "train_dataloader",
        "teardown fit",
    ]
    assert module_data.trainer is trainer
    assert_same_weights(model.net, raw_fit(sgd, epochs=1))
    calls.clear()
    values = trainer.validate(datamodule=module_data, verbose=False)
    assert calls == ["prepare_data", "setup validate", "val_dataloader", "teardown validate"]
    with torch.no_grad():
        expected = mse_loss(model.net(data().tensors[0]), data().tensors[1])
    assert values == [{"val_loss": pytest.approx(float(expected))}]


def test_a_module_may_bring_its_own_loaders() -> None:
    class WithData(Regression):
        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return loader(8)

    model = WithData()
    trainer = quiet(max_epochs=2)
    trainer.fit(model)
    assert_same_weights(model.net, raw_fit(sgd))
    assert list(trainer.validate(verbose=False)[0]) == ["val_loss"]


def test_validate_prints_a_table_of_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    class Fixed(Regression):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("val_acc", 0.625, logger=False)

    assert quiet().validate(Fixed(), loader(4)) == [{"val_acc": 0.625}]
    shown = capsys.readouterr().out
    assert "val_acc" in shown
    assert "0.625" in shown


def test_deterministic_is_set_while_a_run_lasts() -> None:
    seen: list[tuple[bool, bool]] = []

    class See(Callback):
        def on_train_start(self, trainer: Trainer, module: Module) -> None:
            seen.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                )
            )

    for deterministic in (True, "warn", False):
        quiet(max_steps=1, deterministic=deterministic, callbacks=See()).fit(Regression(), loader())
    assert seen == [(True, False), (True, True), (False, False)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_detect_anomaly_names_the_batch_of_a_nonfinite_loss() -> None:
    class Diverging(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (float("nan") if batch_idx == 2 else 1.0)

    with pytest.raises(
        NonFiniteLossError,
        match=r"the loss of batch 2 in epoch 0 \(after 2 optimizer steps\) is nan; expected a ",
    ):
        quiet(max_epochs=1, detect_anomaly=True).fit(Diverging(), loader())
    assert not torch.is_anomaly_enabled()
    model = Diverging()
    quiet(max_epochs=1).fit(model, loader())
    assert first_weight(model.net).isnan().all()


def test_detect_anomaly_finds_a_gradient_that_is_not_finite() -> None:
    class BadBackward(Regression):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            # Finite forward, infinite derivative: sqrt at 0, times 0.
            return (self.net(batch[0]) * 0).sqrt().sum()  # type: ignore[no-any-return]

    with (
        pytest.warns(UserWarning, match="Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        quiet(max_epochs=1, detect_anomaly=True).fit(BadBackward(), loader())


@pytest.mark.parametrize("root_is_training", [True, False])
def test_a_submodule_that_was_frozen_stays_so_unless_the_whole_model_was(
    root_is_training: bool,
) -> None:
    class Frozen(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Dropout()
            self.modes: set[bool] = set()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.modes.add(self.teacher.training)
            return super().training_step(batch, batch_idx)

    model = Frozen()
    if root_is_training:
        model.teacher.eval()
    else:
        model.eval()
    quiet(max_epochs=1).fit(model, loader())
    assert model.modes == {not root_is_training}


class BaseWithArguments(Regression):
    def __init__(self, width: int = 1, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class ChildWithArguments(BaseWithArguments):
    def __init__(self, rate: float, **others: Any) -> None:
        super().__init__(**others)


def test_hyperparameters_of_a_base_class_include_the_subclass() -> None:
    model = ChildWithArguments(0.5, depth=3)
    assert model.hparams == {"rate": 0.5, "width": 1, "depth": 3}
    model.hparams.rate = 0.25
    assert model.hparams["rate"] == 0.25
    model.save_hyperparameters({"extra": 1})
    assert model.hparams.extra == 1


def test_configure_callbacks_is_called_once() -> None:
    made = []

    class WithCallback(Regression):
        def configure_callbacks(self) -> Callback:
            made.append(Callback())
            return made[-1]

    model, trainer = WithCallback(), quiet(max_epochs=1)
    trainer.fit(model, loader(), loader())
    trainer.validate(model, loader(), verbose=False)
    assert len(made) == 1
    assert made[0] in trainer.callbacks


# ---------------------------------------------------------------- what users read


def test_trainer_attributes_describe_the_run() -> None:
    trainer = quiet(
        max_epochs=6,
        limit_train_batches=10,
        limit_val_batches=0.5,
        accumulate_grad_batches={0: 1, 4: 8},
        gradient_clip_val=0.5,
        callbacks=[EarlyStopping("val_loss", patience=99)],
        num_sanity_val_steps=1,
    )
    nothing: list[Any] = [trainer.model, trainer.datamodule]
    nothing += [trainer.train_dataloader, trainer.val_dataloaders]
    assert nothing == [None] * 4
    assert trainer.state.finished
    seen: list[Any] = []

    class Asks(Regression):
        def configure_optimizers(self) -> Any:
            steps: Any = self.trainer.estimated_stepping_batches
            optimizer = SGD(self.parameters(), lr=0.1)
            seen.append(steps)
            return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, steps)}]

        def on_train_start(self) -> None:
            seen.append(self.trainer.run.evaluation.what)

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if not seen[1:]:
                seen.append(self.trainer.run.evaluation.what)

    model, train, evaluated = Asks(), loader(), loader(24)
    trainer.fit(model, train, evaluated)
    assert seen == [44, "validation", ""]
    assert trainer.global_step == 44
    assert trainer.model is model
    assert trainer.train_dataloader.dataset is train.dataset
    assert trainer.val_dataloaders.dataset is evaluated.dataset
    assert trainer.num_training_batches == 10
    assert [one.batches for one in trainer.run.evaluation_loaders["validation"]] == [3]
    options = trainer.options
    assert (options.limit_train_batches, options.limit_val_batches) == (10, 0.5)
    assert (options.limit_test_batches, options.limit_predict_batches) == (1.0, 1.0)
    assert options.step_options.clip == GradientClip(0.5, "norm")
    assert options.step_options.micro_batches_in(trainer.current_epoch) == 8
    assert trainer.checkpoint_callbacks == []
    trainer.validate(model, [loader(8), loader(8)], verbose=False)
    assert len(trainer.val_dataloaders) == 2
    trainer.predict(model, [data(8).tensors[0]] * 4)
    assert [one.batches for one in trainer.run.evaluation_loaders["predict"]] == [4]
    assert trainer.state.status == "finished"
    assert quiet(max_epochs=-1, max_steps=7).options.max_steps == 7


def test_the_steps_of_a_fit_without_an_end_are_infinitely_many() -> None:
    class Asks(Regression):
        steps: list[float]

        def configure_optimizers(self) -> Any:
            self.steps.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    model = Asks()
    model.steps = []
    endless = DataLoader(Endless(8), batch_size=4)
    quiet(max_epochs=1).fit(model, endless)
    quiet(max_epochs=-1, max_steps=3).fit(model, loader())
    quiet(max_epochs=1, max_steps=99).fit(model, loader())
    assert model.steps == [float("inf"), 3, 11]


def test_a_model_is_frozen_and_unfrozen_as_a_whole() -> None:
    model = Regression()
    model.freeze()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.unfreeze()
    assert model.net.training
    assert all(parameter.requires_grad for parameter in model.parameters())
