"""What code written for Lightning relies on: keys, files, hooks, warnings and errors."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils.data import DataLoader

from stratagem import Trainer as OwnTrainer, callbacks as own
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    MissingPackageError,
    StratagemError,
)
from stratagem_lightning.api.accelerators.accelerator import AcceleratorRegistry, CPUAccelerator
from stratagem_lightning.api.callbacks.accumulation import GradientAccumulationScheduler
from stratagem_lightning.api.callbacks.early_stopping import EarlyStopping
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.summary import ModelSummary
from stratagem_lightning.api.callbacks.throughput import ThroughputMonitor
from stratagem_lightning.api.callbacks.timer import Timer
from stratagem_lightning.api.callbacks.weight_averaging import EMAWeightAveraging
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.optimizer import LightningOptimizer
from stratagem_lightning.api.demos.boring_classes import BoringModel, RandomDataset
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.loggers import CSVLogger
from stratagem_lightning.api.plugins import precision as precisions
from stratagem_lightning.api.plugins.environments import (
    LSFEnvironment,
    TorchElasticEnvironment,
)
from stratagem_lightning.api.strategies.sharding import FSDPStrategy, ModelParallelStrategy
from stratagem_lightning.api.strategies.single_device import SingleDeviceStrategy
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.tuner import Tuner
from stratagem_lightning.api.utilities.data import AttributeDict
from stratagem_lightning.api.utilities.migration import migrate_checkpoint
from stratagem_lightning.api.utilities.parsing import lightning_getattr
from stratagem_lightning.api.utilities.version import LIGHTNING_VERSION

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "logger": False,
}


def make(folder: Path, **options: Any) -> Trainer:
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 1}
    return Trainer(**{**QUIET, **limits, "default_root_dir": folder, **options})


# -- callbacks and their checkpoints


def test_states_of_callbacks_have_lightnings_keys_and_values(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="step", mode="max")
    stopping = EarlyStopping("step", strict=False, check_on_train_epoch_end=False)
    make(tmp_path, callbacks=[saver, stopping], limit_val_batches=0).fit(BoringModel())
    states = torch.load(saver.best_model_path)["callbacks"]
    key = (
        "ModelCheckpoint{'monitor': 'step', 'mode': 'max', 'every_n_train_steps': 0, "
        "'every_n_epochs': 1, 'train_time_interval': None}"
    )
    assert states[key]["best_model_path"] == saver.best_model_path
    assert states[key]["current_score"] == states[key]["best_model_score"] == 2
    assert states[key]["kth_best_model_path"] == saver.best_model_path
    assert states[key]["kth_value"] == 2
    assert "EarlyStopping{'monitor': 'step', 'mode': 'min'}" in states


def test_an_average_takes_the_weights_of_epochs_in_too(tmp_path: Path) -> None:
    updates: list[tuple[int, int]] = []

    class Average(EMAWeightAveraging):
        def _update(self, module: Any) -> None:
            updates.append((module.trainer.current_epoch, module.trainer.global_step))
            super()._update(module)

    average = Average(update_every_n_steps=3, update_starting_at_epoch=1)
    make(tmp_path, callbacks=average, max_epochs=2, enable_checkpointing=False).fit(BoringModel())
    assert updates == [(0, 1), (1, 4), (1, 4)]


class Logs(BoringModel):
    def on_validation_epoch_end(self) -> None:
        self.log("loss", float(self.current_epoch))


def test_early_stopping_counts_on_from_a_checkpoint_of_stratagems_own_trainer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "first.ckpt"
    kinds: list[Any] = [(OwnTrainer, own.EarlyStopping, 2), (Trainer, EarlyStopping, 3)]
    for trainer_of, stopping_of, epochs in kinds:
        stopping = stopping_of("loss", patience=9)
        options = {**QUIET, "limit_train_batches": 1, "limit_val_batches": 1}
        trainer = trainer_of(
            **options, max_epochs=epochs, callbacks=[stopping], default_root_dir=tmp_path
        )
        trainer.fit(Logs(), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
    assert stopping.wait_count == 2  # 0.0 was the best: two epochs since then, one in each run


def test_the_last_checkpoint_alone_is_a_file_of_its_own(tmp_path: Path) -> None:
    for names in ({"last.ckpt"}, {"last.ckpt", "last-v1.ckpt"}):
        saver = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
        make(tmp_path, callbacks=saver, max_epochs=2).fit(BoringModel())
        assert {path.name for path in tmp_path.iterdir()} == names
        assert Path(saver.last_model_path).name in names
        assert not Path(saver.last_model_path).is_symlink()
        assert saver.best_model_path == ""


def test_a_name_has_0_for_a_value_that_was_not_logged(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{val_loss:.1f}")
    with pytest.warns(UserWarning, match=r"uses 'val_loss', which was not logged"):
        make(tmp_path, callbacks=saver).fit(BoringModel())
    assert [path.name for path in tmp_path.iterdir()] == ["val_loss=0.0.ckpt"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saver.format_checkpoint_name({}).endswith("val_loss=0.0.ckpt")


def test_overridden_save_checkpoint_is_called_by_model_checkpoint(tmp_path: Path) -> None:
    class Notes(Trainer):
        saved: tuple[str, ...] = ()

        def save_checkpoint(self, filepath: Any, weights_only: bool = False) -> None:
            super().save_checkpoint(filepath, weights_only)
            self.saved += (Path(filepath).name,)

    trainer = Notes(
        **{**QUIET, "limit_train_batches": 1, "limit_val_batches": 0, "max_epochs": 2},
        callbacks=ModelCheckpoint(tmp_path, save_top_k=-1),
    )
    trainer.fit(BoringModel())
    assert trainer.saved == ("epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == set(trainer.saved)


def test_checkpoints_have_lightnings_counters_of_loops(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path)
    make(tmp_path, callbacks=saver, max_epochs=3).fit(BoringModel())
    saved = torch.load(saver.best_model_path)
    assert saved["pytorch-lightning_version"] == LIGHTNING_VERSION
    batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert (batches["current"]["completed"], batches["total"]["completed"]) == (2, 6)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_saved_without_a_modelcheckpoint_has_lightnings_entries_too(
    tmp_path: Path, weights_only: bool
) -> None:
    read: list[Any] = []

    class Reads(BoringModel):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            read.append(checkpoint["loops"])

    trainer = make(tmp_path, enable_checkpointing=False, max_epochs=2)
    trainer.fit(Reads())
    trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only)
    saved = torch.load(tmp_path / "own.ckpt")
    assert saved["pytorch-lightning_version"] == LIGHTNING_VERSION
    assert saved["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 2
    assert [saved["loops"]] == read
    assert ("optimizer_states" in saved) is not weights_only


def test_a_batch_of_none_has_none_as_outputs(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    class Notes(BoringModel):
        def train_dataloader(self) -> Any:
            return [None, torch.ones(1, 32)]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((batch is None, outputs is None))

    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        make(tmp_path, enable_checkpointing=False, limit_val_batches=0).fit(Notes())
    assert seen == [(True, True), (False, False)]


def test_a_rate_finder_skips_a_batch_of_none(tmp_path: Path) -> None:
    class Skips(BoringModel):
        lr = 0.1

        def train_dataloader(self) -> Any:
            return [torch.ones(1, 32), None, torch.ones(1, 32)]

    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        finder = Tuner(make(tmp_path)).lr_find(Skips(), num_training=14)
    assert len(finder.results["lr"]) == 14


def test_throughput_is_logged_by_keywords() -> None:
    logged: list[tuple[Any, int]] = []

    class Logs(Fabric):
        def log_dict(self, *, metrics: Any, step: Any) -> None:  # type: ignore[override]
            logged.append((metrics, step))

    monitor = ThroughputMonitor(Logs(accelerator="cpu", devices=1))
    monitor.update(time=0.5, batches=1, samples=3)
    monitor.compute_and_log()
    assert logged == [({"time": 0.5, "batches": 1, "samples": 3}, 0)]


def test_a_checkpoint_of_an_older_lightning_is_not_migrated() -> None:
    with pytest.raises(
        CheckpointMismatchError, match=r"of Lightning 2\.x, .*'1\.9\.0': upgrade it"
    ):
        migrate_checkpoint({"pytorch-lightning_version": "1.9.0"})


def test_paths_of_checkpoints_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saver = ModelCheckpoint("saved", save_last=True)
    make(tmp_path, callbacks=saver).fit(BoringModel())
    assert Path(saver.best_model_path).parent == tmp_path / "saved"
    assert Path(saver.last_model_path).parent == tmp_path / "saved"


def test_the_checkpoint_that_last_means_is_the_link(tmp_path: Path) -> None:
    trainer = make(tmp_path, callbacks=ModelCheckpoint(save_last=True))
    trainer.fit(BoringModel())
    trainer.validate(ckpt_path="last", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    trainer.validate(ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "epoch=0-step=2.ckpt")


def test_a_checkpoint_of_a_later_epoch_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path)
    make(tmp_path, callbacks=saver, max_epochs=3).fit(BoringModel())
    with pytest.raises(ConfigurationError, match="You restored a checkpoint with current_epoch=3"):
        make(tmp_path).fit(BoringModel(), ckpt_path=saver.best_model_path)


def test_a_missing_model_checkpoint_is_mentioned(tmp_path: Path) -> None:
    first, second = (ModelCheckpoint(tmp_path, monitor=name) for name in ("epoch", "step"))
    make(tmp_path, callbacks=[first, second]).fit(BoringModel())
    with pytest.warns(UserWarning, match="Please add the following callbacks: .*'epoch'"):
        make(tmp_path, callbacks=second, max_epochs=2).fit(
            BoringModel(), ckpt_path=second.best_model_path
        )


def test_a_model_knows_its_trainer_after_the_tuner(tmp_path: Path) -> None:
    model: Any = BoringModel()
    model.lr, trainer = 0.1, make(tmp_path)
    strategy: Any = trainer.strategy
    before = strategy.setup_optimizers
    Tuner(trainer).lr_find(model, num_training=20)
    assert model.trainer is trainer
    assert strategy.setup_optimizers == before


def test_a_manual_step_returns_a_tensor_or_nothing(tmp_path: Path) -> None:
    class Numbers(BoringModel):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 5

    with pytest.raises(StratagemError, match="must return a Tensor or have no return"):
        make(tmp_path, enable_checkpointing=False).fit(Numbers())


def test_a_checkpoint_io_of_lightnings_signature_saves(tmp_path: Path) -> None:
    class IO(SingleFileCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = 1) -> None:
            super().save_checkpoint({**checkpoint, "options": storage_options}, path)

    SingleDeviceStrategy(checkpoint_io=IO()).save_checkpoint(tmp_path / "a.ckpt", {"a": 1})
    assert torch.load(tmp_path / "a.ckpt") == {"a": 1, "options": None}


def test_the_timer_says_in_the_log_why_training_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        make(
            tmp_path,
            callbacks=Timer(1e-6, interval="epoch"),
            max_epochs=-1,
            enable_checkpointing=False,
        ).fit(BoringModel())
    assert "Time limit reached. Elapsed time is" in caplog.text


def test_accumulation_looks_at_the_models_hooks(tmp_path: Path) -> None:
    class Steps(BoringModel):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    trainer, schedule = make(tmp_path), GradientAccumulationScheduler({0: 2})
    with pytest.warns(UserWarning, match="the hooks will not be called on every batch"):
        schedule.on_train_start(trainer, Steps())
    model = BoringModel()
    model.automatic_optimization = False
    with pytest.raises(RuntimeError, match="Automatic gradient accumulation and the"):
        schedule.on_train_start(trainer, model)


def test_model_summary_warns_of_lazy_parameters() -> None:
    summary = ModelSummary(nn.Sequential(nn.LazyLinear(2)))
    with pytest.warns(UserWarning, match="number of parameters detected may be inaccurate"):
        assert summary.total_parameters == 0


# -- the fit


class Stops(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = batch_idx == 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.global_step)


@pytest.mark.parametrize("interval", [None, 2, 3])
def test_should_stop_within_an_epoch_validates_once(tmp_path: Path, interval: int | None) -> None:
    trainer = make(
        tmp_path, limit_train_batches=4, val_check_interval=interval, enable_checkpointing=False
    )
    model = Stops()
    trainer.fit(model)
    assert model.validated == [2]
    assert (trainer.current_epoch, trainer.global_step) == (1, 2)


def test_a_sampler_is_given_each_epoch_once(tmp_path: Path) -> None:
    epochs: list[int] = []
    sampler = torch.utils.data.RandomSampler(RandomDataset(32, 2))
    sampler.set_epoch = epochs.append  # type: ignore[attr-defined]
    loader = DataLoader(RandomDataset(32, 2), sampler=sampler)
    make(tmp_path, max_epochs=2, enable_checkpointing=False).fit(BoringModel(), loader)
    assert epochs == [0, 1]


def test_should_stop_before_min_epochs_logs_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class StopsEarly(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = True

    trainer = make(tmp_path, max_epochs=9, min_epochs=3, enable_checkpointing=False)
    with caplog.at_level(logging.INFO):
        trainer.fit(StopsEarly())
    assert trainer.current_epoch == 3
    (message,) = (text for text in caplog.messages if "signaled to stop" in text)
    assert "`min_epochs=3` or `min_steps=None` has not been met" in message


def test_a_fit_warns_of_an_epoch_shorter_than_the_logging_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path, logger=CSVLogger(tmp_path), enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"training batches \(2\) is smaller than the logging"):
        trainer.fit(BoringModel())
    assert "log_every_n_steps" not in capsys.readouterr().err


def test_a_fit_warns_of_keys_that_manual_optimization_ignores(tmp_path: Path) -> None:
    class Manual(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": schedule, "monitor": "loss"}]

    with pytest.warns(RuntimeWarning, match=r"\['monitor'\], but the keys will be ignored"):
        make(tmp_path, enable_checkpointing=False).fit(Manual())


def test_predicting_needs_a_forward(tmp_path: Path) -> None:
    model: Any = BoringModel()
    model.forward = None
    with pytest.raises(StratagemError, match="requires `forward` method to run"):
        make(tmp_path).predict(model, DataLoader(RandomDataset(32, 2)))


def test_two_algorithms_of_clipping_are_refused(tmp_path: Path) -> None:
    class Clips(BoringModel):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 1.0, "value")

    trainer = make(tmp_path, gradient_clip_algorithm="norm", enable_checkpointing=False)
    with pytest.raises(StratagemError, match=r"passed `clip_gradients\(gradient_clip_algorithm='"):
        trainer.fit(Clips())


def test_loading_refuses_two_values_of_strict(tmp_path: Path) -> None:
    class Loose(BoringModel):
        strict_loading = False

    make(tmp_path, callbacks=ModelCheckpoint(tmp_path, filename="a")).fit(BoringModel())
    with pytest.raises(ValueError, match=r"strict=True\) is in conflict with `Loose.strict_load"):
        Loose.load_from_checkpoint(tmp_path / "a.ckpt", strict=True)
    Loose.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)


def test_a_module_among_the_hyperparameters_is_mentioned() -> None:
    class Net(LightningModule):
        def __init__(self, encoder: nn.Module, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match="'encoder' is an instance of `nn.Module` and is already"):
        assert list(Net(nn.Linear(1, 1), 3).hparams) == ["encoder", "width"]


# -- the tuner, loggers and helpers


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"method": "fit", "dataloaders": [1]}, "`train_dataloaders` and `val_dataloaders`"),
        ({"method": "test", "val_dataloaders": [1]}, "setting `dataloaders` instead"),
        ({"method": "validate"}, "cannot be used with multiple val dataloaders, received 2"),
    ],
)
def test_the_batch_size_is_not_searched_with_these_loaders(
    tmp_path: Path, given: dict[str, Any], match: str
) -> None:
    class Two(BoringModel):
        def val_dataloader(self) -> Any:
            return [super().val_dataloader()] * 2

    with pytest.raises(ConfigurationError, match=match):
        Tuner(make(tmp_path)).scale_batch_size(Two(), **given)


def test_a_batch_size_that_no_loader_uses_is_a_warning(tmp_path: Path) -> None:
    class Fixed(BoringModel):
        def __init__(self, batch_size: int = 1) -> None:
            super().__init__()
            self.batch_size = batch_size
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match="samples all the same|mutually exclusive") as warned:
        Tuner(make(tmp_path)).scale_batch_size(Fixed(), max_trials=2, steps_per_trial=1)
    text = "\n".join(str(each.message) for each in warned)
    assert "`model.batch_size` and `model.hparams.batch_size` are mutually exclusive!" in text
    assert "samples all the same" in text


def test_a_csv_logger_moves_the_rows_of_an_earlier_run_of_its_version_away(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = CSVLogger(tmp_path, "exp", version=0)
        again = pytest.warns(UserWarning, match="exists and is not empty")
        with again if value == 2 else warnings.catch_warnings():
            logger.log_metrics({"a": value}, step=0)
    rows = (tmp_path / "exp" / "version_0" / "metrics.csv").read_text().split()
    assert rows == ["step,a", "0,2.0"]
    (moved,) = (tmp_path / "exp" / "version_0").glob("metrics.*.csv")
    assert moved.read_text().split() == ["step,a", "0,1.0"]
    resumed = CSVLogger(tmp_path, "exp", version=0)
    resumed.begin_run("id", resumed_at=1)
    resumed.log_metrics({"a": 3.0}, step=1)
    assert "0,2.0" in (tmp_path / "exp" / "version_0" / "metrics.csv").read_text()


def test_helpers_know_a_datamodules_hyperparameters(tmp_path: Path) -> None:
    trainer, model = make(tmp_path), BoringModel()
    data = type("Data", (), {"hparams": {"batch_size": 3}})()
    trainer.datamodule = data
    model.trainer = trainer
    assert lightning_getattr(model, "batch_size") == 3
    state = AttributeDict(a=1)
    del state.a
    assert not state


def test_the_registry_of_accelerators_is_a_mapping() -> None:
    kind: Any = CPUAccelerator
    AcceleratorRegistry.register("mine", kind, description="Mine")
    try:
        found = AcceleratorRegistry["mine"]
    finally:
        AcceleratorRegistry.remove("mine")
    assert (found["description"], found["init_params"]) == ("Mine", {})


def test_lightning_optimizer_steps_its_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.5)
    view: Any = LightningOptimizer(optimizer)
    parameter.grad = torch.ones(1)
    view.step()
    view.param_groups = view.param_groups[:]
    assert parameter.item() == 0.5
    assert view.state_dict() == optimizer.state_dict()
    assert isinstance(view, LightningOptimizer)


# -- Fabric, strategies and precision


def test_a_model_logs_by_one_call_of_fabrics_loggers() -> None:
    rows: list[Any] = []
    logger: Any = type("Rows", (), {"log_metrics": lambda self, **row: rows.append(row)})()
    model = Fabric(accelerator="cpu", devices=1, loggers=logger).setup(BoringModel())
    model.log_dict({"a": 1, "b": 2})
    model.log_dict({"c": 1}, logger=False)
    model.log("d", 1, logger=False)
    assert rows == [{"metrics": {"a": 1.0, "b": 2.0}, "step": None}]


def test_a_users_strategy_clips_gradients() -> None:
    calls: list[dict[str, Any]] = []

    class Mine(SingleDeviceStrategy):
        def clip_gradients_norm(self, module: Any, optimizer: Any, **options: Any) -> None:
            calls.append(options)

    fabric = Fabric(accelerator="cpu", devices=1, strategy=Mine())
    layer = nn.Linear(1, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert calls == [{"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": True}]


def test_fabric_launch_refuses_a_result_of_a_function() -> None:
    fabric: Any = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="needs to be a callable"):
        fabric.launch(None)


def parallelize(model: Any, mesh: Any) -> Any:
    return model


@pytest.mark.parametrize(
    "strategy", [FSDPStrategy(), ModelParallelStrategy(parallelize_fn=parallelize)]
)
@pytest.mark.parametrize(
    ("kind", "match", "call"),
    [
        (TypeError, r"storage_options=...\)` is not", lambda s, p: s.save_checkpoint(p, {}, 1)),
        (ConfigurationError, "needs a Fabric", lambda s, p: s.save_checkpoint(p, {})),
        (
            ConfigurationError,
            r"load_checkpoint\(..., state=None\)",
            lambda s, p: s.load_checkpoint(p),
        ),
        (
            NotImplementedError,
            "a single optimizer object",
            lambda s, p: s.load_checkpoint(p, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)),
        ),
        (
            ConfigurationError,
            "must be a single file containing the full state dict",
            lambda s, p: s.load_checkpoint(p, nn.Linear(1, 1)),
        ),
        (
            ConfigurationError,
            "does not point to a valid checkpoint",
            lambda s, p: s.load_checkpoint(p, {"model": nn.Linear(1, 1)}),
        ),
    ],
)
def test_sharding_strategy_refuses_unsupported_saves_and_loads(
    strategy: Any,
    kind: type[Exception],
    match: str,
    call: Callable[[Any, Path], Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=match):
        call(strategy, tmp_path)


def test_a_sharding_strategy_saves_and_loads_with_its_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FSDPStrategy())
    fabric.launch()
    model = fabric.setup(nn.Linear(2, 1))
    strategy: Any = fabric.strategy
    strategy.save_checkpoint(tmp_path / "a.ckpt", {"model": model, "step": 3})
    state = {"model": model, "step": 0}
    strategy.load_checkpoint(tmp_path / "a.ckpt", state)
    torch.distributed.destroy_process_group()
    assert state["step"] == 3


def test_a_trainers_strategy_takes_no_storage_options(tmp_path: Path) -> None:
    strategy: Any = make(tmp_path).strategy
    with pytest.raises(TypeError, match=r"save_checkpoint\(..., storage_options=...\)` is not"):
        strategy.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
    strategy.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt") == {"a": 1}


def test_a_model_for_float64_converts_its_inputs() -> None:
    with pytest.warns(DeprecationWarning, match="deprecated and no longer needed"):
        model = precisions.LightningDoublePrecisionModule(nn.Linear(2, 1).double())
    assert model(torch.ones(1, 2)).dtype == torch.float64


def test_a_device_mesh_is_there_from_the_launch_on() -> None:
    strategy: Any = ModelParallelStrategy(parallelize_fn=parallelize)
    with pytest.raises(RuntimeError, match="Accessing the device mesh before processes"):
        strategy.device_mesh  # noqa: B018


def test_sharding_precisions_say_their_dtypes() -> None:
    with pytest.warns(UserWarning, match="enables computation in lower precision"):
        config = precisions.FSDPPrecision("bf16-true").mixed_precision_config
    assert config == fsdp.MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    assert precisions.FSDPPrecision("32-true").mixed_precision_config.param_dtype == torch.float32


def test_a_precision_clips_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], 0.1)
    precision = precisions.Precision()
    precision.clip_gradients(optimizer)
    assert parameter.grad.tolist() == [3.0, 4.0]
    precision.clip_gradients(optimizer, 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0)
    precision.clip_gradients(optimizer, 0.5, "value")
    assert parameter.grad.max().item() == 0.5


def test_names_of_tpus_warn_and_need_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    tpu = importlib.import_module("stratagem_lightning.api.tpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kinds = [tpu.TPUAccelerator, tpu.SingleTPUStrategy, precisions.TPUPrecision]
    for kind in (*kinds, precisions.XLABf16Precision):
        with (
            pytest.warns(DeprecationWarning, match="is deprecated: its name is"),
            pytest.raises(MissingPackageError, match="torch_xla, which is not installed"),
        ):
            kind()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.warns(DeprecationWarning, match="TPUBf16Precision"):
        assert precisions.TPUBf16Precision().precision == "bf16-true"
    with pytest.raises(ConfigurationError, match="`precision='64-true'` is not supported in XLA"):
        precisions.XLAPrecision("64-true")


def test_environments_look_at_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LSB_HOSTS", raising=False)
    monkeypatch.delenv("LSB_DJOB_RANKFILE", raising=False)
    with pytest.raises(ConfigurationError, match="Did not find the environment variable `LSB_D"):
        LSFEnvironment()
    monkeypatch.setenv("LSB_DJOB_RANKFILE", "")
    with pytest.raises(ConfigurationError, match="variable `LSB_DJOB_RANKFILE` is empty"):
        LSFEnvironment()
    monkeypatch.setenv("LSB_DJOB_RANKFILE", "/ranks")
    monkeypatch.delenv("LSB_JOBID", raising=False)
    with pytest.raises(ConfigurationError, match="Could not find job id"):
        LSFEnvironment()
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match=r"product \(2 \* 2\) does not match the world"):
        TorchElasticEnvironment().validate_settings(2, 2)
