"""What Lightning's classes have beside ours."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError, MissingPackageError
from stratagem.lightning.api.accelerators import CPUAccelerator
from stratagem.lightning.api.data import has_len
from stratagem.lightning.api.datamodule import LightningDataModule, of_file
from stratagem.lightning.api.demos.boring_classes import BoringModel, ManualOptimBoringModel
from stratagem.lightning.api.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from stratagem.lightning.api.fabric import Fabric
from stratagem.lightning.api.loggers import CSVLogger, DummyLogger, TensorBoardLogger
from stratagem.lightning.api.models import from_compiled
from stratagem.lightning.api.module import LightningModule
from stratagem.lightning.api.parsing import lightning_setattr
from stratagem.lightning.api.trainer import Trainer


def loader(samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples)))


class Noting:
    """A logger, and a callback, that keeps what it is given."""

    not_a_method = 1

    def __init__(self) -> None:
        self.given: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any) -> None:
        self.given.append((dict(metrics), step))

    def on_end(self, loss: float) -> None:
        self.given.append(loss)


def test_fabric_saves_what_its_filter_keeps_and_loads_a_bare_state_dict(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "steps": 3}
    keep = {"model": lambda name, _: name == "bias", "steps": lambda name, _: False}
    fabric.save(tmp_path / "part.ckpt", state, filter=keep)
    saved = fabric.load(tmp_path / "part.ckpt", weights_only=True)
    assert (saved["model"].keys(), saved["steps"]) == ({"bias"}, 3)
    for wrong, error, words in (
        ("model", TypeError, "'model'.: expected a dict of functions, by names in the state"),
        ({"model": "bias"}, TypeError, "'bias'}.: expected a function of a key and its value"),
        ({"other": bool}, ValueError, "names 'other'; expected names in .* 'model', 'steps'"),
    ):
        with pytest.raises(error, match=words):
            fabric.save(tmp_path / "none.ckpt", state, filter=wrong)  # type: ignore[arg-type]
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    other = torch.nn.Linear(2, 1)
    fabric.load_raw(tmp_path / "bare.pt", other)
    assert torch.equal(other.weight, model.weight)


def test_fabric_calls_with_what_a_callback_takes_and_leaves_out_what_is_no_method() -> None:
    noting = Noting()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=noting, loggers=noting)
    fabric.call("on_end", loss=1.0, step=2)
    with pytest.warns(UserWarning, match="expected a method, and Noting.not_a_method is a int"):
        fabric.call("not_a_method")
    fabric.log("loss", 2, step=7)
    assert noting.given == [1.0, ({"loss": 2.0}, 7)]


def test_fabric_refuses_loaders_that_it_has_set_up_and_functions_without_an_argument() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    ready = fabric.setup_dataloaders(loader(2))
    with pytest.raises(
        ConfigurationError, match="received one that it has returned before: set up each"
    ):
        fabric.setup_dataloaders(ready)
    with pytest.raises(ConfigurationError, match="expected a loader, received none"):
        fabric.setup_dataloaders()
    with pytest.raises(TypeError, match="received one without arguments: give it one"):
        fabric.launch(lambda: None)


def test_a_module_logs_and_goes_backward_through_fabric() -> None:
    noting = Noting()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=noting)

    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("seen", 1)
            return super().training_step(batch, batch_idx)

    module = Logging()
    with pytest.warns(UserWarning, match="Logging has neither a Trainer nor a Fabric yet"):
        module.training_step(torch.ones(1, 32), 0)
    assert (module.global_rank, module.local_rank, module.logger) == (0, 0, None)
    model = fabric.setup(module)
    model.training_step(torch.ones(1, 32), 0)
    assert noting.given == [({"seen": 1.0}, None)]
    assert module.logger is noting
    manual = ManualOptimBoringModel()
    fabric.setup(manual)
    manual.manual_backward(manual(torch.ones(1, 32)).sum())
    assert manual.layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_becomes_torchscript_with_a_fabric_or_without() -> None:
    model, inputs = BoringModel(), torch.ones(2, 32)
    script = model.to_torchscript()
    assert torch.equal(script(inputs), model(inputs))
    Fabric(accelerator="cpu", devices=1).setup(model)
    assert torch.equal(model.to_torchscript()(inputs), model(inputs))
    model.example_input_array = inputs
    assert torch.equal(model.to_torchscript(method="trace")(inputs), model(inputs))


def test_a_datamodule_says_how_many_samples_it_has_and_reads_hyperparameters_from_yaml(
    tmp_path: Path,
) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return [loader(3), iter([])]

        def val_dataloader(self) -> Any:
            return loader(2)

        def test_dataloader(self) -> Any:
            raise AttributeError("not set up")

    assert str(Data()).split(os.linesep) == [
        "{Train dataloader: 1. size=3 ; 2. size=NA}",
        "{Validation dataloader: size=2}",
        "{Test dataloader: None}",
        "{Predict dataloader: None}",
    ]

    class Sized(LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

    torch.save({"state_dict": {}}, tmp_path / "empty.ckpt")
    (tmp_path / "hparams.yaml").write_text("width: 3\n")
    model = Sized.load_from_checkpoint(
        tmp_path / "empty.ckpt", hparams_file=tmp_path / "hparams.yaml", weights_only=True
    )
    assert model.width == 3


def test_environments_are_asked_without_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert not TorchElasticEnvironment.detect()
    assert not SLURMEnvironment.detect()
    assert LightningEnvironment.detect()
    with pytest.raises(NotImplementedError, match="name the environment: plugins='kubeflow'"):
        KubeflowEnvironment.detect()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert SLURMEnvironment.detect()
    assert SLURMEnvironment.job_id() == 17
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert not SLURMEnvironment.detect()
    assert SLURMEnvironment.job_id() is None
    plain = LightningEnvironment()
    plain.set_global_rank(3)
    plain.set_world_size(4)
    assert (plain.global_rank(), plain.world_size()) == (3, 4)
    plain.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(
        ConfigurationError, match="are 2 ranks, and LightningEnvironment has started 4: expected"
    ):
        plain.validate_settings(num_devices=1, num_nodes=2)


def test_the_cpu_accelerator_is_asked_without_an_object() -> None:
    assert CPUAccelerator.is_available()
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.get_parallel_devices("2") == [torch.device("cpu")] * 2
    assert "cpu_seconds" in CPUAccelerator().get_device_stats("cpu")
    with pytest.raises(ConfigurationError, match="expected a number above 0"):
        CPUAccelerator.parse_devices(0)


def test_loops_are_views_of_the_trainer() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert not trainer.fit_loop.done
    trainer.fit(BoringModel())
    loop = trainer.fit_loop
    assert (loop.max_epochs, loop.max_batches, loop.done) == (1, 3, True)
    assert loop.epoch_progress.current.completed == 1
    assert loop.epoch_loop.global_step == 3
    loop.max_epochs = 2
    assert trainer.max_epochs == 2
    assert not loop.done
    trainer.validate(BoringModel())
    assert trainer.validate_loop.batch_progress.current.completed == 2
    with pytest.raises(
        AttributeError, match="fit_loop has no 'advance'; expected one of max_epochs"
    ):
        loop.advance()
    with pytest.raises(AttributeError, match=r"fit_loop.advance cannot be set; expected one of"):
        loop.advance = None


def test_the_environment_gives_arguments_that_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "False")
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    trainer = Trainer(enable_checkpointing=False)
    assert (trainer.max_steps, trainer.loggers, trainer.accelerator.name) == (7, [], "cpu")
    assert Trainer(max_steps=3, enable_checkpointing=False).max_steps == 3


def test_what_is_left_out_is_what_lightning_takes(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }

    class Numbered(BoringModel):
        def on_train_epoch_end(self) -> None:
            self.log("epochs", float(-self.current_epoch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("norm", self.layer.weight.detach().norm())

    model = Numbered()
    saver = ModelCheckpoint(monitor="epochs", mode="max")
    trainer = Trainer(callbacks=[saver], **options)
    with pytest.warns(UserWarning, match="nothing is saved yet in the ModelCheckpoints"):
        trainer.fit(model, ckpt_path="last")
    assert trainer.ckpt_path is None
    present = trainer.test(model, verbose=False)[0]["norm"]
    with pytest.warns(UserWarning, match="the best weights that fit has saved are taken"):
        best = trainer.test(verbose=False)[0]["norm"]
    assert best != present
    assert trainer.ckpt_path == saver.best_model_path
    again = Trainer(callbacks=[ModelCheckpoint()], **options)
    again.fit(Numbered(), ckpt_path="last")
    assert again.global_step == 4
    assert again.ckpt_path == saver.best_model_path


# -- what much used libraries take from private modules


def test_a_file_of_torch_save_is_mapped_and_executes_nothing(tmp_path: Path) -> None:
    from stratagem.lightning.api.loading import lazy_load

    torch.save({"weight": torch.arange(4.0)}, tmp_path / "model.pth")
    assert torch.equal(lazy_load(tmp_path / "model.pth")["weight"], torch.arange(4.0))
    torch.save({"path": tmp_path}, tmp_path / "objects.pth")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        lazy_load(tmp_path / "objects.pth")
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        lazy_load(tmp_path / "absent.pth")


def test_layers_on_the_meta_device_get_memory_and_first_values() -> None:
    from stratagem.lightning.api.loading import materialize_meta_tensors

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    materialize_meta_tensors(model, torch.device("cpu"))
    assert torch.equal(model.state_dict()["1.running_var"], torch.ones(3))
    assert model(torch.ones(2, 2)).shape == (2, 3)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.empty(1, device="meta"))

    with pytest.raises(TypeError, match="Scale: expected a method reset_parameters"):
        materialize_meta_tensors(Scale(), torch.device("cpu"))


# -- the logger


def test_the_logger_is_tensorboards_or_a_table_where_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(who: str, package: str, extra: str) -> None:
        raise MissingPackageError(f"{who} needs {package}")

    pytest.importorskip("tensorboard")
    found = Trainer(accelerator="cpu", default_root_dir=tmp_path).logger
    assert isinstance(found, TensorBoardLogger)
    assert Path(found.log_dir) == tmp_path / "lightning_logs" / "version_0"
    monkeypatch.setattr("stratagem.loggers.sdk_logger.require_package", absent)
    table = Trainer(accelerator="cpu", logger=True, default_root_dir=tmp_path).logger
    assert isinstance(table, CSVLogger)
    assert Path(table.root_dir) == tmp_path / "lightning_logs"
    monkeypatch.chdir(tmp_path)
    elsewhere = Trainer(accelerator="cpu", default_root_dir="memory://runs").logger
    assert isinstance(elsewhere, CSVLogger)
    assert Path(elsewhere.root_dir).absolute() == tmp_path / "lightning_logs"


def test_helpers_of_lightnings_users_say_what_is_wrong() -> None:
    model = BoringModel()
    with pytest.raises(AttributeError, match="neither BoringModel, its hparams nor its DataModu"):
        lightning_setattr(model, "learning_rate", 0.1)
    with pytest.raises(ConfigurationError, match=r"expected what torch\.compile has "):
        from_compiled(nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"DataLoader has length 0: is that what you want\?"):
        assert has_len(loader(0))


def test_a_quick_run_has_a_logger_that_takes_every_call_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Draws(BoringModel):
        def on_train_end(self) -> None:
            assert self.logger is not None
            self.logger.experiment.add_image("sample", [[0]])
            self.logger.log_metrics({"loss": 1.0}, step=3)
            self.logger.log_table("rows", [])
            self.logger.log_hyperparams({})

    trainer = Trainer(accelerator="cpu", fast_dev_run=True, enable_progress_bar=False)
    trainer.fit(Draws())
    assert isinstance(trainer.logger, DummyLogger)
    assert (trainer.logger.name, trainer.logger.version) == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert Trainer(accelerator="cpu", fast_dev_run=True, logger=False).loggers == []


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_model_is_made_with_the_hyperparameters_that_a_logger_has_written(
    kind: Any, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("tensorboard")
    logger = kind(tmp_path)
    logger.log_hyperparams({"width": 3})
    file = Path(logger.log_dir) / logger.NAME_HPARAMS_FILE
    assert file.name == "hparams.yaml"
    assert of_file(file) == {"width": 3}
    logger.finalize("success")
