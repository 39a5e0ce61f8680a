"""What Lightning's classes have beside ours."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from stratagem import loggers
from stratagem.callbacks import Callback, ModelCheckpoint
from stratagem.data.pytree import map_tensors
from stratagem.errors import CheckpointMismatchError, ConfigurationError, MissingPackageError
from stratagem.strategies import SingleDeviceStrategy
from stratagem_extras.loggers.values import write_hyperparameters
from stratagem_lightning.api.accelerators.accelerator import (
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
)
from stratagem_lightning.api.core.datamodule import LightningDataModule
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.saving import (
    load_hparams_from_yaml,
    of_file,
    save_hparams_to_yaml,
)
from stratagem_lightning.api.core.states import (
    RunningStage,
    TrainerFn,
    TrainerState,
    TrainerStatus,
)
from stratagem_lightning.api.demos.boring_classes import BoringModel, ManualOptimBoringModel
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.loggers import CSVLogger, DummyLogger, TensorBoardLogger
from stratagem_lightning.api.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from stratagem_lightning.api.plugins.precision import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities.data import has_len
from stratagem_lightning.api.utilities.loading import get_filesystem, is_dir
from stratagem_lightning.api.utilities.models import from_compiled, grad_norm
from stratagem_lightning.api.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)
from stratagem_lightning.api.utilities.samplers import (
    DistributedSamplerWrapper,
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from stratagem_lightning.api.utilities.warnings import LightningDeprecationWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)
"""What is advised against here is what the tests are of, or does not matter to them."""


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


def test_fabric_save_filter_keeps_chosen_entries(tmp_path: Path) -> None:
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


def test_fabric_call_passes_accepted_arguments() -> None:
    noting = Noting()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=noting, loggers=noting)
    fabric.call("on_end", loss=1.0, step=2)
    with pytest.warns(UserWarning, match="Skipping the callback `Noting.not_a_method`: expected a"):
        fabric.call("not_a_method")
    fabric.log("loss", 2, step=7)
    fabric.log_dict({"loss": 3, "acc": 0.5}, step=8)
    assert noting.given == [1.0, ({"loss": 2.0}, 7), ({"loss": 3.0, "acc": 0.5}, 8)]
    assert fabric.loggers == [fabric.logger] == [noting]
    with pytest.raises(ConfigurationError, match="Fabric has no logger: expected one of"):
        _ = Fabric(accelerator="cpu", devices=1).logger


def test_fabric_makes_tensors_and_models_in_their_final_format() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    assert fabric._precision is fabric.strategy.precision
    with fabric.init_tensor():
        assert torch.zeros(3).dtype is torch.float64
    model = fabric.setup_module(torch.nn.Linear(2, 1))
    assert isinstance(model, torch.nn.Module)
    with fabric.rank_zero_first(), fabric.rank_zero_first(local=True):
        pass


def test_fabric_refuses_loaders_twice_and_functions_without_argument() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    ready = fabric.setup_dataloaders(loader(2))
    with pytest.raises(ConfigurationError, match="A dataloader should be passed only once"):
        fabric.setup_dataloaders(ready)
    with pytest.raises(ConfigurationError, match="requires at least one dataloader, received none"):
        fabric.setup_dataloaders()
    with pytest.raises(TypeError, match="needs to take at least one argument"):
        fabric.launch(lambda: None)


def test_a_module_logs_and_goes_backward_through_fabric() -> None:
    noting = Noting()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=noting)

    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("seen", 1)
            return super().training_step(batch, batch_idx)

    module = Logging()
    with pytest.warns(UserWarning, match="reference is not registered on Logging yet"):
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


@pytest.mark.filterwarnings("ignore:.*torch.*script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_module_becomes_torchscript_with_a_fabric_or_without() -> None:
    model, inputs = BoringModel(), torch.ones(2, 32)
    with pytest.warns(LightningDeprecationWarning, match="to_torchscript` has been deprecated"):
        script = model.to_torchscript()
    assert torch.equal(script(inputs), model(inputs))
    Fabric(accelerator="cpu", devices=1).setup(model)
    assert torch.equal(model.to_torchscript()(inputs), model(inputs))
    model.example_input_array = inputs
    assert torch.equal(model.to_torchscript(method="trace")(inputs), model(inputs))


def test_datamodule_prints_sizes_and_loads_hparams_from_yaml(
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
    with pytest.raises(NotImplementedError, match="name the environment, plugins='kubeflow'"):
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
    with pytest.raises(ConfigurationError, match=r"\(1 \* 2\) does not match the world size \(4\)"):
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
    assert loop.epoch_loop.batch_progress.total.completed == 3
    assert loop.epoch_loop.val_loop.batch_progress.total.completed == 2
    steps = loop.state_dict()["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    assert steps["step"]["total"]["completed"] == 3
    progress = loop.epoch_loop.automatic_optimization.optim_progress
    assert progress.optimizer.step.total.completed == progress.optimizer_steps == 3
    assert loop.epoch_loop.manual_optimization.optim_step_progress.total.completed == 0
    loop.max_epochs = 2
    assert trainer.max_epochs == 2
    assert not loop.done
    trainer.validate(BoringModel())
    assert trainer.validate_loop.batch_progress.current.completed == 2
    assert loop.epoch_loop.val_loop.batch_progress.total.completed == 0
    seen: list[Any] = []

    class Looking(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer.fit_loop.batch_idx, batch_idx))
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_start(self) -> None:
            seen.append(self.trainer.fit_loop.batch_idx)

        def on_train_epoch_start(self) -> None:
            seen.append(self.trainer.fit_loop.epoch_loop.batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> int:
            return batch_idx

        def on_predict_epoch_end(self) -> None:
            seen.append(list(trainer.predict_loop.predictions))

    trainer.limit_train_batches, trainer.num_sanity_val_steps = 2, 0
    trainer.fit(Looking())
    assert seen == [-1, (0, 0), (1, 1), 1, -1, (0, 0), (1, 1), 1]
    trainer.limit_predict_batches = 2
    assert trainer.predict(Looking()) == seen[-1] == trainer.predict_loop.predictions == [0, 1]
    assert trainer.predict_loop.epoch_batch_indices == [[]]
    assert trainer.predict(Looking(), return_predictions=False) is None
    assert (trainer.predict_loop.predictions, seen[-1]) == ([], [])
    assert not trainer.predict_loop.return_predictions
    trainer.predict(BoringModel())
    again = pickle.loads(pickle.dumps(trainer))
    assert len(again.predict()) == 2  # with the model
    with pytest.raises(
        AttributeError, match="fit_loop has no 'advance'; expected one of max_epochs"
    ):
        loop.advance()
    with pytest.raises(AttributeError, match=r"fit_loop.advance cannot be set; expected one of"):
        loop.advance = None


def test_a_trainer_shows_texts_flags_and_loaders_as_scripts_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = Trainer(accelerator="cpu", default_root_dir="~/runs", fast_dev_run=1)
    assert trainer.default_root_dir + "/a" == str(tmp_path / "runs/a")
    assert trainer.fast_dev_run is True
    trainer.default_root_dir = str(tmp_path)
    trainer.fit(TakesTwo(), [loader(2), loader(4)])
    assert [len(one) for one in trainer.train_dataloader] == [2, 4]
    assert Trainer(accelerator="cpu").fast_dev_run is False


def test_a_trainer_says_whether_one_is_a_batch_or_all_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "stratagem"):
        Trainer(accelerator="cpu", limit_train_batches=1, limit_val_batches=1.0, fast_dev_run=2)
        Trainer(accelerator="cpu", limit_test_batches=2, max_epochs=1)
        Trainer(accelerator="cpu", val_check_interval=1)
    assert caplog.messages == [
        "`Trainer(limit_train_batches=1)` was configured so 1 batch will be used; 1.0 means the "
        "whole epoch",
        "`Trainer(limit_val_batches=1.0)` was configured so 100% of the batches will be used; 1 "
        "means a single batch",
        "`Trainer(val_check_interval=1)` was configured so validation will run after every batch; "
        "1.0 means the whole epoch",
    ]


class TakesTwo(BoringModel):
    val_dataloader: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer.weight.sum() * batch[0][0].mean() * batch[1][0].mean()


def test_the_environment_gives_arguments_that_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "False")
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    trainer = Trainer(enable_checkpointing=False)
    assert (trainer.max_steps, trainer.loggers, trainer.accelerator.name) == (7, [], "cpu")
    assert Trainer(max_steps=3, enable_checkpointing=False).max_steps == 3


def test_omitted_trainer_arguments_default_like_lightning(tmp_path: Path) -> None:
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
    with pytest.warns(UserWarning, match=r"test\(ckpt_path='last'\): nothing is saved yet"):
        trainer.test(model, ckpt_path="last", verbose=False)
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


class NotesState(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.state.stage)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.state.stage)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.state.stage)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self.seen.append((trainer.state.fn.value, trainer.state.stage))


def test_the_state_of_a_trainer_is_of_lightnings_enumerations(tmp_path: Path) -> None:
    notes = NotesState()
    trainer = Trainer(
        default_root_dir=tmp_path,
        fast_dev_run=False,
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=1,
        limit_test_batches=1,
        callbacks=notes,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    assert (trainer.state.status, trainer.state.fn) == (TrainerStatus.INITIALIZING, None)
    assert trainer.state == TrainerState()
    trainer.fit(BoringModel())
    state = trainer.state
    assert (state.status, state.fn, state.stage) == (
        TrainerStatus.FINISHED,
        TrainerFn.FITTING,
        None,
    )
    assert repr(state) == "TrainerState(status=finished, fn=fit, stage=None)"
    assert trainer.state.finished
    assert trainer.state.stopped
    trainer.test(BoringModel(), verbose=False)
    sanity, training, validating, testing = notes.seen[0], *notes.seen[2:]
    assert sanity is RunningStage.SANITY_CHECKING
    assert training is RunningStage.TRAINING
    assert validating is RunningStage.VALIDATING
    assert testing == ("test", RunningStage.TESTING)
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.INTERRUPTED
    assert (trainer.state.fn, trainer.interrupted) == ("fit", True)
    assert (TrainerState().status, TrainerState().stage) == (TrainerStatus.INITIALIZING, None)


def test_a_bar_counts_no_validation_in_an_epoch_without_one(tmp_path: Path) -> None:
    totals: list[float] = []

    class Counts(BoringModel):
        def on_train_epoch_end(self) -> None:
            bar: Any = self.trainer.progress_bar_callback
            totals.append(bar.total_val_batches)

    trainer = Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        limit_train_batches=1,
        limit_val_batches=2,
        check_val_every_n_epoch=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Counts())
    assert totals == [0, 2]


class Tenths(Precision):
    """One of a user's own, in Lightning's words."""

    precision = "tenths"

    def convert_input(self, data: Any) -> Any:
        return map_tensors(lambda tensor: tensor / 10, data)

    def convert_output(self, data: Any) -> Any:
        return -data


def test_a_precision_of_ones_own_converts_batches_and_outputs() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=Tenths())
    model = fabric.setup(torch.nn.Identity())
    assert model(torch.tensor([10.0])).item() == -1.0
    assert Tenths().precision == fabric.plan.precision.name == "tenths"


def test_precisions_have_lightnings_methods() -> None:
    half = HalfPrecision("bf16-true")
    with half.module_init_context():
        assert torch.nn.Linear(1, 1).weight.dtype is torch.bfloat16
    with half.tensor_init_context():
        assert torch.ones(1).dtype is torch.bfloat16
    assert half.convert_input(torch.ones(1)).dtype is torch.bfloat16
    assert half.convert_output(torch.ones(1).bfloat16()).dtype is torch.float32
    mixed = MixedPrecision("bf16-mixed", device="cpu")
    assert (mixed.precision, mixed.device, mixed.scaler) == ("bf16-mixed", "cpu", None)
    with mixed.autocast_context_manager():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    mixed.backward(weight.sum(), None)
    mixed.optimizer_step(optimizer)
    assert weight.item() == 0.5
    for name in ("32-true", "bf16-true", "16-mixed", "bf16-mixed"):
        assert DeepSpeedPrecision(name).precision == FSDPPrecision(name).precision == name
    whole = DeepSpeedPrecision("32-true")
    assert isinstance(whole, DeepSpeedPrecision)
    assert whole.convert_module(torch.nn.Linear(1, 1)).weight.dtype is torch.float32
    with DeepSpeedPrecision("bf16-true").module_init_context():
        assert torch.ones(1).dtype is torch.bfloat16
    with pytest.raises(ConfigurationError, match=r"is not supported in FSDP\. `precision` must"):
        FSDPPrecision("64-true")
    with pytest.raises(ConfigurationError, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", scaler=object())


def test_mixed_precision_uses_the_given_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    assert isinstance(precision, MixedPrecision)
    assert precision.scaler is scaler
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision.backward(weight.sum(), None)
    assert weight.grad is not None
    assert weight.grad.item() == 8.0
    precision.unscale_gradients(optimizer)
    precision.optimizer_step(optimizer)
    assert (weight.item(), precision.step_was_skipped) == (0.5, False)


def test_a_module_clips_its_gradients_through_fabric() -> None:
    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    fabric, module = Fabric(accelerator="cpu", devices=1), Model()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    for algorithm, largest in (("value", 0.5), ("norm", 0.5**0.5)):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 9.0)
        clip = 0.5 if algorithm == "value" else 1.0
        module.clip_gradients(optimizer, clip, algorithm)
        assert module.layer.bias.grad is not None
        assert module.layer.bias.grad.item() == pytest.approx(largest, rel=1e-4)
    assert wrapped.layer is module.layer


def test_samplers_of_ranks_repeat_nothing_and_shuffle_another_one() -> None:
    shares = [UnrepeatedDistributedSampler(range(7), rank=r, num_replicas=3) for r in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(7))
    inner = SequentialSampler("abcdef")
    epochs: list[int] = []
    inner.set_epoch = epochs.append  # type: ignore[attr-defined]
    halves = [DistributedSamplerWrapper(inner, rank=r, num_replicas=2) for r in range(2)]
    for half in halves:
        half.set_epoch(3)
    assert sorted([*halves[0], *halves[1]]) == list(range(6))
    assert epochs == [3, 3]
    wrappers = [
        UnrepeatedDistributedSamplerWrapper(inner, rank=r, num_replicas=4) for r in range(4)
    ]
    assert sorted(index for wrapper in wrappers for index in wrapper) == list(range(6))


def test_file_systems_are_found_by_path(tmp_path: Path) -> None:
    assert "memory" in get_filesystem("memory://run/last.ckpt").protocol
    assert "file" in get_filesystem(Path("run")).protocol
    assert is_dir(get_filesystem(tmp_path), tmp_path)
    assert not is_dir(get_filesystem(tmp_path), tmp_path / "none")
    store = SimpleNamespace(
        protocol=("s3", "s3a"), isfile=lambda path: False, isdir=lambda p: False
    )
    assert is_dir(store, "s3://bucket/none")
    assert not is_dir(store, "s3://bucket/none", strict=True)


def test_all_gather_on_one_rank_keeps_the_shape(tmp_path: Path) -> None:
    gathered: list[Any] = []

    class Gathers(BoringModel):
        def on_train_start(self) -> None:
            gathered.append(self.all_gather({"a": torch.ones(3)})["a"])

    Trainer(max_steps=1, limit_val_batches=0, barebones=True).fit(Gathers())
    gathered.append(Fabric(accelerator="cpu", devices=1).all_gather(torch.ones(3)))
    assert [tuple(tensor.shape) for tensor in gathered] == [(3,), (3,)]


class LogsBoth(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.log("a", out["loss"], on_step=True, on_epoch=True, prog_bar=True)
        self.log("hidden", 1.0, logger=False)
        return out

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("b", 2.0, on_step=True, on_epoch=True, reduce_fx="AVG")
        self.log("unseen", 1.0, logger=False)


def test_metrics_have_the_names_that_scripts_read(tmp_path: Path) -> None:
    trainer = Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=2,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(LogsBoth())
    assert set(trainer.callback_metrics) == {
        *("a", "a_step", "a_epoch", "hidden"),
        *("b", "b_epoch", "unseen"),
    }
    assert set(trainer.logged_metrics) == {"a_step", "a_epoch", "b_step", "b_epoch"}
    assert all(isinstance(value, torch.Tensor) for value in trainer.logged_metrics.values())
    assert trainer.progress_bar_metrics.keys() == {"a_step", "a_epoch"}
    assert all(isinstance(value, float) for value in trainer.progress_bar_metrics.values())
    loaders = [loader(4), loader(4)]
    assert trainer.validate(LogsBoth(), loaders, verbose=False) == [
        {"b_epoch/dataloader_idx_0": 2.0},
        {"b_epoch/dataloader_idx_1": 2.0},
    ]
    # Those of the fit are not among those of the next run.
    assert "a" not in trainer.callback_metrics


def test_the_norm_of_gradients_is_named_by_a_float() -> None:
    layer = torch.nn.Linear(1, 1)
    layer(torch.ones(1, 1)).backward()
    assert set(grad_norm(layer, 2)) == {
        *("grad_2.0_norm/weight", "grad_2.0_norm/bias"),
        "grad_2.0_norm_total",
    }


def test_a_command_line_reads_the_arguments_that_the_trainer_hands_on() -> None:
    shown = inspect.signature(Trainer).parameters
    assert shown["max_epochs"].annotation == int | None
    assert shown["log_every_n_steps"].default is None
    assert "options" not in shown
    assert Trainer(fast_dev_run=True, barebones=False).fast_dev_run is True


# -- what much used libraries take from private modules


def test_a_file_of_torch_save_is_mapped_and_executes_nothing(tmp_path: Path) -> None:
    from stratagem_lightning.api.utilities.loading import lazy_load

    torch.save({"weight": torch.arange(4.0)}, tmp_path / "model.pth")
    assert torch.equal(lazy_load(tmp_path / "model.pth")["weight"], torch.arange(4.0))
    torch.save({"path": tmp_path}, tmp_path / "objects.pth")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        lazy_load(tmp_path / "objects.pth")
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        lazy_load(tmp_path / "absent.pth")


def test_layers_on_the_meta_device_get_memory_and_first_values() -> None:
    from stratagem_lightning.api.utilities.loading import materialize_meta_tensors

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
    monkeypatch.setattr("stratagem_extras.loggers.sdk_logger.require_package", absent)
    table = Trainer(accelerator="cpu", logger=True, default_root_dir=tmp_path).logger
    assert isinstance(table, CSVLogger)
    assert Path(table.root_dir) == tmp_path / "lightning_logs"
    monkeypatch.chdir(tmp_path)
    elsewhere = Trainer(accelerator="cpu", default_root_dir="memory://runs").logger
    assert isinstance(elsewhere, CSVLogger)
    assert Path(elsewhere.root_dir).absolute() == tmp_path / "lightning_logs"


def test_lightning_helpers_raise_clear_errors() -> None:
    model = BoringModel()
    with pytest.raises(AttributeError, match="is neither stored in the model namespace nor the"):
        lightning_setattr(model, "learning_rate", 0.1)
    with pytest.raises(ConfigurationError, match=r"expected what torch\.compile has "):
        from_compiled(nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"returned 0 length. Is that what you want\?"):
        assert has_len(loader(0))


def test_a_strategy_tells_of_its_ranks_and_its_device() -> None:
    told: list[Any] = []

    class Asks(BoringModel):
        def on_train_start(self) -> None:
            one: Any = self.trainer.strategy
            told.extend([one.root_device, one.world_size, one.global_rank, one.is_global_zero])
            told.append(one.broadcast({"a": 1}))

    trainer = Trainer(max_steps=1, limit_val_batches=0, barebones=True, accelerator="cpu")
    trainer.fit(Asks())
    assert told == [torch.device("cpu"), 1, 0, True, {"a": 1}]
    with pytest.raises(AttributeError, match="no attribute 'ranks'"):
        _ = SingleDeviceStrategy().world_size
    with pytest.raises(AttributeError, match="no attribute 'accelerator'"):
        _ = SingleDeviceStrategy().root_device


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


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_fit_without_hyperparameters_writes_hparams_yaml(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("tensorboard")
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=kind(tmp_path), enable_progress_bar=False
    )
    trainer.fit(BoringModel())
    file = f"{trainer.log_dir}/hparams.yaml"
    assert load_hparams_from_yaml(file) == {}
    BoringModel.load_from_checkpoint(
        trainer.checkpoint_callbacks[0].best_model_path, hparams_file=file
    )


def test_weights_of_another_model_are_a_runtime_error_with_torchs_words(tmp_path: Path) -> None:
    class Wider(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

    for saved, loaded, words in (
        (BoringModel(), Wider, "Missing"),
        (Wider(), BoringModel, "Unexpected"),
    ):
        torch.save({"state_dict": saved.state_dict()}, tmp_path / "other.ckpt")
        with pytest.raises(
            RuntimeError,
            match=rf'another model.*{words} key\(s\) in state_dict: "head.weight", "head.bias"',
        ) as raised:
            loaded.load_from_checkpoint(tmp_path / "other.ckpt")
        assert isinstance(raised.value, CheckpointMismatchError)
        again = pickle.loads(pickle.dumps(raised.value))
        assert (again.missing, again.unexpected) == (raised.value.missing, raised.value.unexpected)
        loaded.load_from_checkpoint(tmp_path / "other.ckpt", strict=False)


def test_hyperparameters_are_written_and_read_as_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")

    class Kind(str, Enum):
        small = "s"

    file = tmp_path / "hparams.yaml"
    nested = {"sizes": [1, 2], "kind": Kind.small}
    given = Namespace(rate=0.1, nested=nested, kind=Kind.small, dtype=torch.float32)
    with pytest.warns(UserWarning, match="Skipping 'dtype' parameter in .*: a dtype cannot be"):
        save_hparams_to_yaml(file, given)
    assert load_hparams_from_yaml(file, use_omegaconf=False) == {
        "rate": 0.1,
        "nested": {"sizes": [1, 2], "kind": "s"},
        "kind": "small",
    }
    file.write_text("layer: !!python/name:torch.nn.Linear ''\n")
    with pytest.raises(ConfigurationError, match=r"nothing in it is executed .* take that"):
        load_hparams_from_yaml(file)
    with pytest.warns(UserWarning, match="there is no file .*other.yaml"):
        assert load_hparams_from_yaml(tmp_path / "other.yaml") == {}
    with pytest.raises(ConfigurationError, match=r"there is no folder .*none': make it"):
        save_hparams_to_yaml(tmp_path / "none" / "hparams.yaml", {})


def test_components_chosen_by_name_have_lightning_classes() -> None:
    for name, kind in (
        ("32-true", Precision),
        ("64-true", DoublePrecision),
        ("bf16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ):
        trainer = Trainer(accelerator="cpu", precision=name, logger=False)
        assert isinstance(trainer.precision_plugin, kind)
        others = {DoublePrecision, HalfPrecision, MixedPrecision} - {kind}
        assert not isinstance(trainer.precision_plugin, tuple(others))
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert not isinstance(trainer.accelerator, type("Mine", (CPUAccelerator,), {}))
    assert isinstance(trainer.strategy.cluster_environment, LightningEnvironment)


def test_a_model_that_a_library_has_taken_its_trainer_from_goes_on() -> None:
    """neuralforecast does so after each fit, to keep a Trainer out of what it stores."""

    model, trainer = (
        BoringModel(),
        Trainer(accelerator="cpu", limit_predict_batches=1, logger=False),
    )
    trainer.predict(model)
    del vars(model)["_trainer"]
    assert (model.current_epoch, model.loggers) == (0, [])
    assert len(trainer.predict(model) or []) == 1


def test_names_that_libraries_on_the_index_use() -> None:
    """pytorch-forecasting's types and get_init_args; GluonTS asks whether a fit validates."""
    from stratagem_lightning.api.utilities import types
    from stratagem_lightning.api.utilities.parsing import get_init_args

    assert (str in get_args(types.PATH), torch.device in get_args(types.DEVICE)) == (True, True)
    told = []

    class Model(BoringModel):
        def __init__(self, width: int, *, rate: float = 0.1, **options: Any) -> None:
            super().__init__()
            self.given = get_init_args(inspect.currentframe())  # type: ignore[arg-type]

        def configure_optimizers(self) -> Any:
            loop = self.trainer.fit_loop.epoch_loop
            told.append(loop.val_loop._data_source.is_defined())
            return super().configure_optimizers()

    model = Model(3, depth=2)
    assert model.given == {"width": 3, "rate": 0.1, "depth": 2}
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_steps": 1}
    Trainer(**options).fit(model)
    Trainer(**options, limit_val_batches=0).fit(model)
    assert told == [True, False]


def test_evaluations_take_their_arguments_in_lightnings_order(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def test_dataloader(self) -> Any:
            return [torch.ones(2, 32)] * 3

        val_dataloader = test_dataloader

    class Seen(BoringModel):
        batches = 0

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.batches += 1

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.batches += 1

        test_dataloader = val_dataloader = None  # type: ignore[assignment]

    model = Seen()
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.test(model, None, None, False, Data())
    trainer.validate(model, None, None, False, Data())
    assert model.batches == 6


def test_an_accelerator_that_is_written_for_lightning_trains(tmp_path: Path) -> None:
    class Own(Accelerator):
        name = "own"

        def setup_device(self, device: torch.device) -> None: ...

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("cpu", 0) for _ in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {"seen_bytes": 7}

    AcceleratorRegistry.register("own", Own, description="an own one")
    try:
        assert "own" in AcceleratorRegistry.available_accelerators()
        assert isinstance(AcceleratorRegistry.get("own"), Own)
        trainer = Trainer(accelerator="own", logger=False, max_steps=2, default_root_dir=tmp_path)
        trainer.fit(BoringModel())
        assert (trainer.accelerator.name, trainer.global_step) == ("own", 2)
        assert isinstance(trainer.accelerator, Own)
        assert trainer.accelerator.device_stats(torch.device("cpu")) == {"seen_bytes": 7}
        assert trainer.accelerator.process_group_backend == "gloo"
        with pytest.raises(ConfigurationError, match="own"):
            AcceleratorRegistry.register("own", Own)

        class Counted(Own):
            @staticmethod
            def name() -> str:  # type: ignore[override]
                return "counted"

            @staticmethod
            def get_parallel_devices(devices: Any) -> list[torch.device]:
                return [torch.device("cpu")] * devices

        trainer = Trainer(accelerator=Counted(), logger=False, default_root_dir=tmp_path)
        trainer.fit(BoringModel(), [torch.ones(2, 32)])
        assert trainer.accelerator.name == "counted"
    finally:
        AcceleratorRegistry.remove("own")
    assert "own" not in AcceleratorRegistry
    assert Trainer(accelerator="auto", logger=False).accelerator.name == "cpu"
    assert isinstance(Trainer(accelerator="cpu", logger=False).accelerator, Accelerator)


def test_numbers_of_a_file_of_hyperparameters_are_read_as_numbers(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="`nox -s loggers` runs this: PyYAML is not installed")
    given: dict[str, Any] = {
        "rate": 1e-05,
        "far": 1e20,
        "most": float("inf"),
        "least": -float("inf"),
    }
    given = {**given, "text": "1e-05 Infinity", "part": 2.5e-3, "nested": {"small": [-3e-9]}}
    write_hyperparameters(tmp_path / "hparams.yaml", given)
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == given
    loggers.CSVLogger(tmp_path, version="own", name="").log_hyperparams(given)
    assert json.loads((tmp_path / "own" / "hparams.json").read_text()) == given


def test_early_stopping_shows_its_best_value_as_a_tensor() -> None:
    from stratagem_lightning.api.callbacks.early_stopping import EarlyStopping

    stopping = EarlyStopping("loss")
    stopping.load_state_dict({**stopping.state_dict(), "best_score": 0.1})
    assert stopping.best_score.item() == stopping.state_dict()["best_score"] == 0.1


@pytest.mark.parametrize("precision", [16, "16", "16-mixed"])
def test_half_precision_on_a_cpu_is_bfloat16_with_a_warning(precision: int | str) -> None:
    text = f"precision={precision!r} is for GPUs: this run uses a CPU, and trains with"
    with pytest.warns(UserWarning, match=text):
        trainer = Trainer(accelerator="cpu", precision=precision, logger=False)
    assert trainer.strategy.precision.name == "bf16-mixed"
    with pytest.warns(UserWarning, match=text):
        fabric = Fabric("cpu", precision=precision)
    assert fabric.strategy.precision.name == "bf16-mixed"


def test_no_gpus_mean_the_cpu_and_no_devices_are_refused() -> None:
    trainer = Trainer(gpus=0, logger=False)
    assert trainer.plan.accelerator.name == "cpu"
    with pytest.raises(ConfigurationError, match="devices=0: expected a number of devices"):
        Trainer(devices=0, logger=False)


def test_arguments_of_fabric_given_twice_are_refused() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'accelerator'"):
        Fabric("cpu", accelerator="cpu")


def test_a_logger_of_tensorboard_may_compute_its_name_and_version(tmp_path: Path) -> None:
    class Own(TensorBoardLogger):
        @property
        def name(self) -> str:  # type: ignore[override]
            return "computed"

        @property
        def version(self) -> str:  # type: ignore[override]
            return "seven"

    assert Path(Own(tmp_path).log_dir) == tmp_path / "computed" / "seven"
    assert TensorBoardLogger(tmp_path, name="given").name == "given"


def test_a_hyperparameter_is_found_in_an_object_of_the_users_class() -> None:
    class Settings:
        learning_rate = 0.5

    model = type("Own", (BoringModel,), {"hparams": Settings()})()
    assert lightning_hasattr(model, "learning_rate")
    assert lightning_getattr(model, "learning_rate") == 0.5
    lightning_setattr(model, "learning_rate", 0.1)
    assert lightning_getattr(model, "learning_rate") == 0.1
    assert not lightning_hasattr(model, "width")
