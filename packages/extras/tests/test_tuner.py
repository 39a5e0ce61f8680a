"""The Tuner finds a batch size and a learning rate, and leaves everything else as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stratagem import DataModule, Module, Trainer
from stratagem.accelerators import Availability, CPUAccelerator
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_extras.tuner import BatchSizeFinder, LearningRateFinder, Tuner


class Net(Module):
    """Runs out of memory where a batch has more than `room` samples."""

    def __init__(self, batch_size: int = 2, lr: float = 0.1, room: int = 1000) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.lr, self.room = batch_size, lr, room
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1)
        )
        self.head = torch.nn.Linear(4, 1)
        self.tried: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tried.append(len(batch[0]))
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(f"no room for {len(batch[0])} samples")
        loss: Tensor = (self.head(self.layers(batch[0])) - batch[1]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(300, 3, generator=generator)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DataLoader(data, self.batch_size, shuffle=True)

    val_dataloader = train_dataloader


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    options = {"max_steps": 5, "accelerator": "cpu", **options}
    return Trainer(
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        **options,
    )


@pytest.mark.parametrize(
    ("mode", "room", "found"),
    [("power", 100, 64), ("power", 1000, 300), ("binsearch", 100, 100), ("binsearch", 3, 3)],
)
def test_the_largest_batch_that_fits_is_found(mode: Any, room: int, found: int) -> None:
    model = Net(room=room)
    tuner = Tuner(trainer())
    assert tuner.scale_batch_size(model, mode=mode, margin=0.0) == found
    assert model.batch_size == model.hparams.batch_size == found
    assert max(model.tried) <= max(300, 2 * room)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_batch_is_tried_in_any_run(method: Any) -> None:
    class All(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.training_step(batch, batch_idx)

        test_dataloader = predict_dataloader = Net.train_dataloader

    assert Tuner(trainer()).scale_batch_size(All(room=50), method=method) == 32


class OwnMemory(CPUAccelerator):
    """Has memory for about 200 samples, as a device has its own."""

    def availability(self) -> Availability:
        return Availability(1, "played", memory=20_000)


def test_trials_go_on_from_the_predicted_size() -> None:
    def tried(accelerator: Any, room: int) -> list[int]:
        model = Net(room=room)
        one = trainer(accelerator=accelerator)
        Tuner(one).scale_batch_size(model, steps_per_trial=1)
        return model.tried

    assert tried("cpu", 100) == [2, 4, 8, 16, 32, 64, 128]
    assert tried(OwnMemory(), 100) == [2, 128, 64]
    assert tried(OwnMemory(), 1000) == [2, 128, 256, 300]


def test_the_limits_of_the_search() -> None:
    tuner = Tuner(trainer())
    assert tuner.scale_batch_size(Net(), max_val=40) == 40
    assert tuner.scale_batch_size(Net(), max_trials=3, init_val=4) == 16
    assert tuner.scale_batch_size(Net(), max_trials=0, init_val=4) == 4
    assert tuner.scale_batch_size(Net(room=5), init_val=64, mode="binsearch", margin=0.0) == 5
    assert tuner.scale_batch_size(Net(room=100), mode="binsearch", margin=0.1) == 90


def test_a_datamodule_may_have_the_batch_size() -> None:
    class Data(DataModule):
        size = 2

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.ones(40, 3), torch.ones(40, 1)), self.size)

    data = Data()
    model = Net(room=10)
    assert Tuner(trainer()).scale_batch_size(model, datamodule=data, batch_arg_name="size") == 8
    assert data.size == 8
    assert model.batch_size == 2


@pytest.mark.parametrize(("method", "shown"), [("fit", "train"), ("validate", "val")])
def test_trainer_shows_the_dataloader_after_scale_batch_size(
    method: Any, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = Net(room=20), DataModule()
    data.train_dataloader = data.val_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        TensorDataset(torch.ones(40, 3), torch.ones(40, 1)), model.batch_size
    )
    one = trainer(max_steps=1)
    with caplog.at_level("INFO", "stratagem"):
        assert Tuner(one).scale_batch_size(model, datamodule=data, method=method) == 16
    assert "batch size 8 fits, trying batch size 16" in caplog.text
    tuned = one.train_dataloader if method == "fit" else one.val_dataloaders
    assert (tuned.batch_size, len(tuned.dataset), one.datamodule) == (16, 40, data)
    if method == "fit":
        assert (one.num_training_batches, len(one.val_dataloaders)) == (3, 3)
    assert one.model is None
    model.batch_size = 5
    one.fit(model, datamodule=data)
    assert one.train_dataloader.batch_size == 5


def test_scale_batch_size_refuses_bad_input() -> None:
    tuner = Tuner(trainer())
    with pytest.raises(ConfigurationError, match="given loaders, whose batch size is fixed"):
        tuner.scale_batch_size(Net(), train_dataloaders=Net().train_dataloader())
    with pytest.raises(ConfigurationError, match="nor a DataModule has 'size'"):
        tuner.scale_batch_size(Net(), batch_arg_name="size")
    with pytest.raises(ConfigurationError, match="mode='fast'"):
        tuner.scale_batch_size(Net(), mode="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not even a batch of one sample fits"):
        tuner.scale_batch_size(Net(room=0))
    with pytest.raises(ConfigurationError, match="with 2 ranks"):
        Tuner(Trainer(accelerator="cpu", devices=2, strategy="ddp")).scale_batch_size(Net())
    with pytest.raises(ConfigurationError, match="processes of their own"):
        Tuner(Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn")).lr_find(Net())

    class Fixed(Net):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.ones(40, 3), torch.ones(40, 1)), 4)

    model = Fixed()
    with pytest.raises(UserCodeError, match="batches had 4 samples all the same"):
        tuner.scale_batch_size(model)
    assert model.batch_size == 2  # as before

    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        tuner.scale_batch_size(Broken())
    with pytest.warns(UserWarning, match="since `fast_dev_run` is enabled"):
        assert Tuner(trainer(fast_dev_run=True)).scale_batch_size(Net()) is None


def test_the_learning_rate_at_which_the_loss_falls_is_suggested() -> None:
    model = Net(batch_size=32)
    finder = Tuner(trainer()).lr_find(model, num_training=60, max_lr=10.0)
    assert finder is not None
    rates = finder.results["lr"]
    assert len(rates) == len(finder.results["loss"]) <= 60
    assert rates[0] == 1e-8
    # As Lightning's finder: the second step takes two parts of the range.
    assert rates[1] / rates[0] == pytest.approx((10.0 / 1e-8) ** (2 / 60))
    assert rates[2] / rates[1] == pytest.approx((10.0 / 1e-8) ** (1 / 60))
    suggested = finder.suggestion()
    assert suggested is not None
    assert 1e-4 < suggested < 10.0
    assert model.lr == model.hparams.lr == suggested


def test_rates_may_grow_linearly_and_go_to_another_attribute() -> None:
    class Own(Net):
        rate = 0.5

    model = Own(batch_size=32)
    finder = Tuner(trainer()).lr_find(
        model,
        min_lr=0.1,
        max_lr=0.3,
        num_training=20,
        mode="linear",
        early_stop_threshold=None,
        attr_name="rate",
    )
    assert finder is not None
    # From the first rate to the last, which the last step takes.
    assert finder.results["lr"] == pytest.approx([0.1] + [0.1 + 0.01 * n for n in range(2, 21)])
    assert model.rate == finder.suggestion()
    assert model.lr == 0.1


def test_a_sweep_ends_where_the_loss_explodes() -> None:
    finder = Tuner(trainer()).lr_find(
        Net(batch_size=32), min_lr=0.01, max_lr=1e4, num_training=50, update_attr=False
    )
    assert finder is not None
    assert len(finder.results["lr"]) < 50


def test_lr_find_refuses_bad_input() -> None:
    tuner = Tuner(trainer())
    with pytest.raises(ConfigurationError, match="0 < min_lr < max_lr"):
        tuner.lr_find(Net(), min_lr=1.0, max_lr=0.1)
    with pytest.raises(ConfigurationError, match="has no 'rate'"):
        tuner.lr_find(Net(), attr_name="rate")
    with pytest.raises(ConfigurationError, match="takes one optimizer"):
        tuner.lr_find(Several())
    with pytest.warns(UserWarning, match="suggests nothing"):
        tuner.lr_find(Net(), num_training=3)
    with pytest.warns(UserWarning, match="Skipping learning rate finder since `fast_dev_run`"):
        assert Tuner(trainer(fast_dev_run=True)).lr_find(Net()) is None


class Several(Net):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_a_fit_after_tuning_is_the_same_as_without(tmp_path: Path) -> None:
    def run(tune: bool) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(4)
        random.seed(4)
        model, saver = Net(batch_size=8), ModelCheckpoint(tmp_path, save_top_k=0)
        one = trainer(saver, max_steps=6)
        one.fit(model)  # something that is to be kept
        before = {name: kept for name, kept in vars(one).items() if name != "_opened"}
        model.head.weight.grad = torch.ones_like(model.head.weight)
        model.layers[2].eval()
        model.head.bias.requires_grad = False
        if tune:
            assert Tuner(one).lr_find(model, num_training=20, update_attr=False) is not None
            assert Tuner(one).scale_batch_size(model, init_val=8, max_val=8) == 8
        assert {name: vars(one)[name] for name in before} == before
        assert one.global_step == 6
        assert one.model is model
        assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
        assert not model.layers[2].training
        assert not model.head.bias.requires_grad
        numbers = [random.random(), float(torch.rand(()))]
        trainer(max_steps=4).fit(model)
        return {k: v.clone() for k, v in model.state_dict().items()}, numbers

    tuned, numbers = run(tune=True)
    plain, expected = run(tune=False)
    assert numbers == expected
    for name, value in plain.items():
        assert torch.equal(tuned[name], value), name
    assert list(tmp_path.iterdir()) == []


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    finder = Tuner(trainer()).lr_find(Net(), num_training=15, update_attr=False)
    assert finder is not None
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        finder.plot(suggest=True)


def test_callbacks_tune_at_the_beginning_of_a_run() -> None:
    size = BatchSizeFinder(init_val=4, max_val=16)
    rate = LearningRateFinder(max_lr=10.0)
    model = Net()
    fitted = trainer(size, rate, max_steps=-1, max_epochs=1)
    fitted.fit(model)
    assert size.optimal_batch_size == model.batch_size == 16
    assert fitted.train_dataloader.batch_size == 16
    assert rate.optimal_lr is not None
    assert rate.optimal_lr.suggestion() == model.lr
    assert fitted.optimizers[0].param_groups[0]["initial_lr"] == model.lr
    assert fitted.global_step == fitted.num_training_batches == 19
    assert fitted.callbacks[:2] == [size, rate]

    size = BatchSizeFinder(max_trials=2)
    trainer(size, LearningRateFinder()).validate(model)
    assert size.optimal_batch_size == 4
