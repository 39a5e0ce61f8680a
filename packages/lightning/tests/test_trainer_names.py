"""Lightning's names of arguments and attributes, on Lightning's Trainer and Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Module, callbacks, strategies
from stratagem.errors import ConfigurationError
from stratagem_lightning.api import loggers
from stratagem_lightning.api.callbacks.checkpoint import Checkpoint
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.saving import load_from_checkpoint
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.trainer import Trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)
"""What is advised against here is what the tests are of, or does not matter to them."""


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight - batch.sum() / 10).square()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.sum())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(count), 2)  # type: ignore[arg-type]


def quiet(*own: Any, **options: Any) -> Trainer:
    options = {"num_sanity_val_steps": 0, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=list(own),
        **options,
    )


def test_barebones_turns_off_all_that_does_not_train() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "barebones": True}
    one = Trainer(**options, max_epochs=1)
    assert one.callbacks == []
    assert one.loggers == []
    assert (one.num_sanity_val_steps, one.log_every_n_steps) == (0, 0)
    model = Net()
    one.fit(model, numbers(6))
    assert one.global_step == 3
    for name, value in (
        ("profiler", "simple"),
        ("logger", True),
        ("num_sanity_val_steps", 3),
        ("enable_model_summary", True),
        ("detect_anomaly", True),
        ("fast_dev_run", True),
    ):
        with pytest.raises(ConfigurationError, match=f"barebones=True .*{name}={value!r}"):
            Trainer(**{**options, name: value})


def test_barebones_drops_logged_values() -> None:
    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(accelerator="cpu", devices=1, barebones=True, max_steps=1)
    with pytest.warns(UserWarning, match=r"trying to `self.log\(\)` but `Trainer\(barebones=True"):
        trainer.fit(Logs())
    assert trainer.callback_metrics == trainer.logged_metrics == {}


def test_trainer_flags_in_a_sanity_check() -> None:
    def note(trainer: Trainer, module: Module) -> None:
        names = ("training", "validating", "sanity_checking", "evaluating")
        seen.append([name for name in names if getattr(trainer, name)])

    seen: list[list[str]] = []
    hooks = callbacks.LambdaCallback(
        on_fit_start=note,
        on_sanity_check_start=note,
        on_validation_start=note,
        on_sanity_check_end=note,
        on_train_start=note,
    )
    quiet(hooks, max_epochs=1, num_sanity_val_steps=1).fit(Net(), numbers(2), numbers(2))
    check = ["sanity_checking", "evaluating"]
    assert seen == [["training"], check, check, check, ["training"], ["validating", "evaluating"]]


def test_trainer_flags_in_a_run() -> None:
    last: list[bool] = []
    seen: dict[str, Any] = {}

    def note(trainer: Trainer, module: Module, *_: Any) -> None:
        last.append(trainer.is_last_batch)
        seen["training"] = (trainer.training, trainer.evaluating)

    def validated(trainer: Trainer, module: Module) -> None:
        seen["validating"] = (trainer.training, trainer.evaluating)

    hooks = callbacks.LambdaCallback(on_train_batch_end=note, on_validation_start=validated)
    one = quiet(hooks, max_epochs=1)
    assert not one.is_last_batch
    one.fit(Net(), numbers(6), numbers(2))
    assert last == [False, False, True]
    assert seen == {"training": (True, False), "validating": (False, True)}
    assert one.enable_validation
    assert not one.received_sigterm
    assert not quiet(limit_val_batches=0).enable_validation


def test_a_trainer_shows_its_options_and_its_parts() -> None:
    early = callbacks.EarlyStopping("val_loss", patience=99)
    seen: list[Any] = []

    class Asks(Net):
        def on_train_start(self) -> None:
            seen.append((self.trainer.training, self.trainer.validating))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if not seen:
                seen.append((self.trainer.training, self.trainer.validating))

    one = quiet(
        early,
        max_epochs=5,
        limit_train_batches=10,
        limit_val_batches=0.5,
        accumulate_grad_batches={0: 1, 4: 8},
        gradient_clip_val=0.5,
        num_sanity_val_steps=1,
    )
    assert (one.ckpt_path, one.progress_bar_callback, one.lightning_module) == (None, None, None)
    assert one.num_val_batches == []
    model = Asks()
    one.fit(model, numbers(40), numbers(12))
    assert seen == [(False, False), (True, False)]
    assert one.lightning_module is model
    assert (one.num_training_batches, one.num_val_batches) == (10, [3])
    assert one.num_sanity_val_batches == [1]
    assert (one.limit_train_batches, one.limit_val_batches) == (10, 0.5)
    assert (one.limit_test_batches, one.limit_predict_batches) == (1.0, 1.0)
    assert (one.gradient_clip_val, one.gradient_clip_algorithm) == (0.5, "norm")
    assert one.accumulate_grad_batches == 8
    assert (one.num_devices, one.device_ids, one.num_nodes, one.node_rank) == (1, [0], 1, 0)
    assert (one.accelerator.name, one.precision) == ("cpu", "32-true")
    assert one.early_stopping_callback is early
    assert one.fit_loop.total_batch_idx == 49  # the last of 50
    one.predict(model, numbers(8))
    assert (one.num_predict_batches, one.num_test_batches) == ([4], [])
    assert not one.interrupted
    bar = callbacks.ProgressBar()
    shown = Trainer(accelerator="cpu", callbacks=bar, logger=False, enable_checkpointing=False)
    assert shown.progress_bar_callback is bar


def test_options_may_be_set_between_and_within_fits() -> None:
    class Stops(Net):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.fit_loop.max_epochs = 2  # type: ignore[attr-defined]

    one = quiet(max_epochs=1, limit_train_batches=3.0)
    one.fit_loop.max_epochs = 5
    assert one.max_epochs == one.fit_loop.max_epochs == 5
    one.fit(Stops(), numbers(20))
    assert one.current_epoch == 2
    one.limit_train_batches = None
    one.fit_loop.epoch_loop.max_steps = 4
    one.fit_loop.min_epochs = None
    one.fit(Net(), numbers(20))
    assert (one.global_step, one.limit_train_batches) == (4, 1.0)
    with pytest.raises(ConfigurationError, match="max_epochs=-2: expected a whole number"):
        one.fit_loop.max_epochs = -2
    with pytest.raises(ConfigurationError, match=r"limit_test_batches=1.5: expected a number of"):
        one.limit_test_batches = 1.5


def test_gpus_and_tpu_cores_are_short_for_accelerator_and_devices() -> None:
    for front in (Fabric, Trainer):
        with pytest.raises(ConfigurationError, match="accelerator='gpu' is not available on this"):
            front(gpus=2)
        with pytest.raises(ConfigurationError, match="accelerator='tpu' is not available on this"):
            front(tpu_cores=8)
    assert Fabric("cpu", gpus=0).plan.accelerator.name == "cpu"


@pytest.mark.parametrize(
    "also", [{"accelerator": "cpu"}, {"devices": 3}, {"tpu_cores": 8}], ids=lambda also: str(also)
)
def test_gpus_together_with_devices_or_accelerator_is_refused(also: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="is short for accelerator=") as caught:
        Fabric(gpus=2, **also)
    assert "give one or the other" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(accelerator="cpu", gpus=2)
    assert str(caught.value) == (
        "gpus=2 is short for accelerator='gpu' and devices=2; received accelerator='cpu' and "
        "devices='auto' as well: give one or the other"
    )


def test_the_folder_of_logs_has_two_names(tmp_path: Path) -> None:
    assert loggers.CSVLogger(root_dir=tmp_path).save_dir == tmp_path
    with pytest.raises(ConfigurationError, match="expected one of the two, which mean the same"):
        loggers.CSVLogger(tmp_path, root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"CSVLogger\(save_dir='s3://bucket/logs'\)"):
        loggers.CSVLogger(root_dir="s3://bucket/logs")
    pytest.importorskip("tensorboard")
    assert loggers.TensorBoardLogger(root_dir=tmp_path).save_dir == tmp_path
    with pytest.raises(ConfigurationError, match=r"TensorBoardLogger\(save_dir='a', root_dir='b'"):
        loggers.TensorBoardLogger("a", root_dir="b")


def test_a_model_is_loaded_onto_a_device_as_torch_load_says(tmp_path: Path) -> None:
    one = quiet(max_steps=1, limit_val_batches=0)
    one.fit(BoringModel())
    one.save_checkpoint(saved := tmp_path / "saved.ckpt")
    load = BoringModel.load_from_checkpoint
    for where in ("cpu", {"cuda:0": "cpu"}, {"cpu": "cpu"}, lambda storage, location: storage):
        assert load(saved, map_location=where).device == torch.device("cpu")
    for where in ({"cpu": "meta"}, lambda storage, location: torch.empty(0, device="meta")):
        assert load(saved, map_location=where).device.type == "meta"


def test_a_strategy_knows_its_trainer(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False)
    trainer.fit(model := BoringModel())
    strategy: Any = trainer.strategy
    assert strategy.lightning_module is model
    assert strategy.model is trainer.model
    assert strategy.optimizers == trainer.optimizers
    assert strategy.lr_scheduler_configs == trainer.lr_scheduler_configs
    assert strategy.launcher is trainer.plan.launcher
    assert strategy.batch_to_device({"x": torch.ones(1)})["x"].device == strategy.root_device
    strategy.save_checkpoint({"a": torch.ones(2)}, tmp_path / "own.ckpt")
    assert strategy.load_checkpoint(tmp_path / "own.ckpt")["a"].tolist() == [1, 1]
    strategy.remove_checkpoint(tmp_path / "own.ckpt")
    assert list(tmp_path.iterdir()) == []
    alone: Any = strategies.SingleDeviceStrategy()
    assert alone.model is None
    with pytest.raises(AttributeError, match=r"no attribute 'lightning_module'. Use trainer.model"):
        alone.lightning_module  # noqa: B018


def test_accelerator_has_the_methods_of_lightning() -> None:
    accelerator: Any = Trainer(accelerator="cpu", logger=False).accelerator
    assert accelerator.is_available()
    assert accelerator.auto_device_count() >= 1
    assert isinstance(accelerator.get_device_stats("cpu"), dict)
    assert Fabric("cpu").accelerator.name == "cpu"
    with pytest.raises(AttributeError, match="'CPUAccelerator' object has no attribute 'unheard'"):
        accelerator.unheard  # noqa: B018


def test_accelerator_connector_has_the_chosen_components() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    connector = trainer._accelerator_connector
    assert connector.strategy is trainer.strategy
    assert connector.accelerator is trainer.accelerator
    assert connector.is_distributed
    assert connector._strategy_flag == "ddp"
    assert connector.parallel_devices == connector._parallel_devices == [torch.device("cpu")] * 2
    assert trainer.scaler is None


def test_other_private_attributes_raise_with_advice() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False)
    with pytest.raises(AttributeError) as raised:
        trainer._results.clear()
    assert str(raised.value) == (
        "trainer._results has no 'clear' in Stratagem; expected one of DATALOADER_SUFFIX, metrics; "
        "use trainer.callback_metrics"
    )
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'unheard'"):
        trainer.unheard  # noqa: B018


def test_a_checkpoint_callback_is_an_instance_of_its_base() -> None:
    assert isinstance(callbacks.ModelCheckpoint(), Checkpoint)
    assert issubclass(callbacks.OnExceptionCheckpoint, Checkpoint)
    assert not isinstance(callbacks.EarlyStopping(monitor="loss"), Checkpoint)


def test_private_loading_leaves_out_an_override(tmp_path: Path) -> None:
    class Own(BoringModel):
        @classmethod
        def load_from_checkpoint(cls, *arguments: Any, **options: Any) -> Any:
            return load_from_checkpoint(cls, *arguments, **options)

    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False)
    trainer.fit(model := Own())
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    loaded = Own.load_from_checkpoint(tmp_path / "own.ckpt")
    assert torch.equal(loaded.layer.weight, model.layer.weight)


def test_trainer_subclass_sets_attributes_before_init() -> None:
    class Own(Trainer):
        def __init__(self, **options: Any) -> None:
            self.log_every_n_steps = 7
            assert self.log_every_n_steps == 7
            self.profiler = None
            self.logger = loggers.DummyLogger()
            super().__init__(**options)

    trainer = Own(accelerator="cpu", devices=1, logger=False)
    assert (trainer.logger, trainer.log_every_n_steps) == (None, 50)
    assert type(trainer.profiler).__name__ == "PassThroughProfiler"
    trainer.logger = own = loggers.DummyLogger()
    assert (trainer.logger, trainer.loggers) == (own, [own])


class Grows(Net):
    """Has other parameters from its second batch on."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizer: Any = torch.optim.SGD
        self.later = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.optimizer(self.parameters(), lr=0.1)
        return made

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.optimizer = self.later
            strategy: Any = self.trainer.strategy
            strategy.setup_optimizers(self.trainer)


def test_a_strategy_sets_up_optimizers_of_other_parameters_within_a_fit() -> None:
    model = Grows(torch.optim.SGD)
    quiet(max_epochs=1).fit(model, numbers(4))
    # One step of 0.1 on the gradient 2 * (1 - (2 + 3) / 10).
    assert model.weight.item() == pytest.approx(0.9)


def test_optimizers_of_another_class_are_refused_within_a_fit() -> None:
    with pytest.raises(ConfigurationError, match="Adam in the place of a SGD"):
        quiet(max_epochs=1).fit(Grows(torch.optim.Adam), numbers(4))


def test_a_strategy_sets_up_optimizers_only_within_a_fit() -> None:
    trainer = quiet()
    strategy: Any = trainer.strategy
    with pytest.raises(ConfigurationError, match="within a fit on one device"):
        strategy.setup_optimizers(trainer)


def test_values_are_logged_by_lightnings_arguments_in_its_order() -> None:
    class Logs(LightningModule):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("a", batch.sum(), True, None, False, True, "max", True, False, None, True, 2)
            self.log("b", 1.0, enable_graph=True, sync_dist_group=None, metric_attribute="b")

    trainer = quiet()
    assert trainer.validate(Logs(), numbers(4), verbose=False) == [{"a": 5.0, "b": 1.0}]
    assert trainer.progress_bar_metrics == {"a": 5.0}


def test_max_epochs_is_none_until_the_first_fit_needs_it() -> None:
    one = quiet()
    assert one.max_epochs is None
    assert one.fit_loop.max_epochs is None
    one.max_epochs = 2
    assert one.fit_loop.max_epochs == 2
    limited = quiet(max_steps=1)
    assert limited.max_epochs is None
    assert not limited.fit_loop.done
    limited.fit(Net(), numbers(4))
    assert limited.max_epochs == -1
    assert quiet(max_epochs=3).max_epochs == 3
    assert quiet(fast_dev_run=True).max_epochs == 1


def test_after_a_fit_the_loop_tells_its_last_batch() -> None:
    class Ends(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

    one = quiet(max_epochs=2)
    one.fit(Net(), numbers(10))
    assert one.fit_loop.batch_idx == 4
    assert one.fit_loop.total_batch_idx == 9
    assert one.is_last_batch
    early = quiet(max_epochs=2)
    early.fit(Ends(), numbers(10))
    assert early.fit_loop.batch_idx == 3
    assert early.is_last_batch
    assert early.global_step == 6
    part = quiet(max_steps=2)
    part.fit(Net(), numbers(10))
    assert part.fit_loop.batch_idx == 1
    assert not part.is_last_batch


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_ctrl_c_ends_a_script_and_leaves_a_notebook(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(Net):
        def on_fit_start(self) -> None:
            raise KeyboardInterrupt

        on_validation_start = on_fit_start

    script = quiet(max_steps=1)
    with pytest.raises(SystemExit) as ended:
        getattr(script, stage)(Pressed(), numbers(4))
    assert ended.value.code == 1
    assert isinstance(ended.value.__cause__, KeyboardInterrupt)
    assert script.interrupted
    monkeypatch.setattr("sys.ps1", ">>>", raising=False)
    notebook = quiet(max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        getattr(notebook, stage)(Pressed(), numbers(4))
