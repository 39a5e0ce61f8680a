"""Errors contain the phrase that Lightning has for them, and are of the kind that it raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stratagem import Callback
from stratagem.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from stratagem.checkpoint import SingleFileCheckpointIO as TorchCheckpointIO
from stratagem.errors import ConfigurationError, StratagemError, UserCodeError
from stratagem_extras.tuner import LearningRateFinder
from stratagem_lightning.api.callbacks.early_stopping import EarlyStopping
from stratagem_lightning.api.callbacks.finders import BatchSizeFinder
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.throughput import Throughput
from stratagem_lightning.api.callbacks.timer import Timer
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    RandomDataset,
)
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.loggers import CSVLogger
from stratagem_lightning.api.plugins.environments import LightningEnvironment
from stratagem_lightning.api.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from stratagem_lightning.api.strategies.ddp import DDPStrategy
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.tuner import Tuner
from stratagem_lightning.api.utilities import phrases
from stratagem_lightning.api.utilities.seed import seed_everything

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning",
    "ignore:1 of the optimizers:UserWarning",
    "ignore:`LightningModule.to_torchscript` has been deprecated",
)


def make(**options: Any) -> Trainer:
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    return Trainer(
        **{"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, **off, **options},
        enable_model_summary=False,
    )


def fit(options: dict[str, Any] | None = None, **own: Any) -> Any:
    """Fit a model with methods of its own."""
    model = type("Mine", (BoringModel,), own)()
    return make(limit_train_batches=1, limit_val_batches=1, **(options or {})).fit(model)


def returning(value: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Any], Any]:
    """Return a `configure_optimizers`."""
    return lambda self: value(torch.optim.SGD(self.parameters(), 0.1))


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def of_another(optimizer: torch.optim.Optimizer) -> Any:
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(other, 1)]


class WithoutData(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


def with_two_values_of_a_hyperparameter() -> None:
    model, data = BoringModel(), BoringDataModule()
    model.save_hyperparameters({"width": 1})
    data.save_hyperparameters({"width": 2})
    make(logger=True, max_steps=1).fit(model, datamodule=data)


class Same(Callback):
    state_key = "same"

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def as_rank_1() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        environment: Any = LightningEnvironment
        mine = type("Mine", (environment,), {"creates_processes_externally": False})
        make(strategy="ddp", devices=2, plugins=mine()).fit(BoringModel())


def twice_set_up() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.setup(fabric.setup(torch.nn.Linear(1, 1)))


def log_with_fabric(value: Any) -> None:
    logger = CSVLogger("logs")
    Fabric(accelerator="cpu", devices=1, loggers=logger).log_dict({"a": value})


def two_groups_of_one_name(optimizer: torch.optim.Optimizer) -> Any:
    given = [{"params": one, "name": "a"} for one in optimizer.param_groups[0]["params"]]
    return torch.optim.SGD(given, 0.1)


def takes_index(self: Any, batch: Any, batch_idx: int, optimizer_idx: int) -> None: ...


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def with_scheduler(make_one: Callable[[Any], Any], **fields: Any) -> dict[str, Any]:
    def both(optimizer: torch.optim.Optimizer) -> Any:
        made = {"scheduler": make_one(optimizer)} if make_one is not dict else {}
        return {"optimizer": optimizer, "lr_scheduler": {**made, **fields}}

    return {"configure_optimizers": returning(both)}


def started_twice() -> None:
    profiler = SimpleProfiler()
    profiler.start("read")
    profiler.start("read")


CASES: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("accelerator name: `accelerator='no'`", ValueError, lambda: make(accelerator="no")),
    ("Precision 12 is invalid", ValueError, lambda: make(precision=12)),
    ("Precision 'no' is invalid", ValueError, lambda: make(precision="no")),
    ("When passing string value for the `profiler`", ValueError, lambda: make(profiler="no")),
    (
        "Received multiple values for ClusterEnvironment",
        ValueError,
        lambda: make(plugins=[LightningEnvironment(), LightningEnvironment()]),
    ),
    (
        "Received multiple values for CheckpointIO",
        ValueError,
        lambda: make(plugins=[TorchCheckpointIO(), TorchCheckpointIO()]),
    ),
    ("value is not a valid input using", ValueError, lambda: make(devices=0)),
    ("`max_epochs` must be a non-negative integer or -1", ValueError, lambda: make(max_epochs=-2)),
    ("`max_steps` must be a non-negative integer or -1", ValueError, lambda: make(max_steps=-2)),
    (
        "`gradient_clip_val` should be an int or a float",
        TypeError,
        lambda: make(gradient_clip_val=(1, 2)),
    ),
    (
        "`gradient_clip_algorithm` norm2 is invalid",
        ValueError,
        lambda: make(gradient_clip_algorithm="norm2"),
    ),
    (
        "`check_val_every_n_epoch` should be an integer.",
        ValueError,
        lambda: make(check_val_every_n_epoch=1.2),
    ),
    (
        "`reload_dataloaders_every_n_epochs` should be an int >= 0",
        ValueError,
        lambda: make(reload_dataloaders_every_n_epochs=-1),
    ),
    ("`fast_dev_run` should be >= 0", ValueError, lambda: make(fast_dev_run=-1)),
    (
        "You have passed invalid value 1.2 for `limit_val_batches`",
        ValueError,
        lambda: make(limit_val_batches=1.2),
    ),
    (
        "`enable_checkpointing=False` but found `ModelCheckpoint`",
        ValueError,
        lambda: make(callbacks=ModelCheckpoint()),
    ),
    (
        "Found more than one stateful callback",
        RuntimeError,
        lambda: make(callbacks=[Same(), Same()]),
    ),
    (
        "`val_check_interval` should be an integer or a time-based duration",
        ValueError,
        lambda: make(val_check_interval=0.5, check_val_every_n_epoch=None),
    ),
    (
        "`model` must be a `LightningModule`, got `Linear`",
        TypeError,
        lambda: make().fit(torch.nn.Linear(1, 1)),
    ),
    ("No `training_step()` method defined.", UserCodeError, lambda: fit(training_step=None)),
    (
        "An invalid train_dataloader was passed to `Trainer.fit",
        TypeError,
        lambda: make().fit(WithoutData()),
    ),
    (
        "less than or equal to the number of the training batches",
        ValueError,
        lambda: fit({"val_check_interval": 100}),
    ),
    (
        "`ModelCheckpoint` is not configured.",
        ValueError,
        lambda: make().test(BoringModel(), ckpt_path="best"),
    ),
    ("`Trainer.validate()` requires a `LightningModule`", TypeError, lambda: make().validate()),
    (
        "Checkpoint file not found",
        FileNotFoundError,
        lambda: make().fit(BoringModel(), ckpt_path="not/there.ckpt"),
    ),
    (
        "Saving a checkpoint is only possible if a model is attached",
        AttributeError,
        lambda: make().save_checkpoint("a.ckpt"),
    ),
    (
        "must include a monitor when a `ReduceLROnPlateau`",
        UserCodeError,
        lambda: fit(**with_scheduler(plateau)),
    ),
    (
        "Unknown configuration for model optimizers",
        UserCodeError,
        lambda: fit(configure_optimizers=lambda self: 1),
    ),
    (
        'The "interval" key in lr scheduler dict must be "step" or "epoch"',
        UserCodeError,
        lambda: fit(**with_scheduler(scheduler, interval="batch")),
    ),
    (
        'The lr scheduler dict must have the key "scheduler"',
        UserCodeError,
        lambda: fit(**with_scheduler(dict, interval="step")),
    ),
    (
        "attached with an optimizer that wasn't returned",
        UserCodeError,
        lambda: fit(configure_optimizers=returning(of_another)),
    ),
    (
        "ReduceLROnPlateau conditioned on metric nothere which is not available. Available metrics "
        "are: ",
        UserCodeError,
        lambda: fit(**with_scheduler(plateau, monitor="nothere")),
    ),
    (
        "multiple optimizers is only supported with manual optimization",
        RuntimeError,
        lambda: fit(configure_optimizers=returning(lambda one: [one, one])),
    ),
    (
        "Remove the `optimizer_idx` argument from `training_step`",
        RuntimeError,
        lambda: fit(training_step=takes_index),
    ),
    (
        "Automatic gradient clipping is not supported for manual optimization",
        ValueError,
        lambda: fit({"gradient_clip_val": 1.0}, automatic_optimization=False),
    ),
    (
        "The closure hasn't been executed",
        UserCodeError,
        lambda: fit(optimizer_step=lambda self, *arguments, **options: None),
    ),
    (
        "the 'loss' key needs to be present",
        UserCodeError,
        lambda: fit(training_step=lambda self, batch, batch_idx: {"a": 1}),
    ),
    (
        "`training_step` must return a Tensor, a dict, or None",
        UserCodeError,
        lambda: fit(training_step=lambda self, batch, batch_idx: 1.0),
    ),
    (
        "`self.log(on_step=False, on_epoch=False)` is not useful.",
        UserCodeError,
        lambda: fit(
            on_train_batch_end=lambda self, *_: self.log("a", 1.0, on_step=False, on_epoch=False)
        ),
    ),
    (
        "Cannot use `LearningRateMonitor` callback with a `Trainer` that has no logger.",
        ValueError,
        lambda: fit({"callbacks": LearningRateMonitor()}),
    ),
    (
        "Cannot use `DeviceStatsMonitor` callback with a `Trainer` that has no logger.",
        ValueError,
        lambda: fit({"callbacks": DeviceStatsMonitor()}),
    ),
    (
        "A single `Optimizer` cannot have multiple parameter groups with identical `name`",
        ValueError,
        lambda: fit(
            {"callbacks": LearningRateMonitor(), "logger": True},
            configure_optimizers=returning(two_groups_of_one_name),
        ),
    ),
    (
        "`Tuner.lr_find()` currently only works with single optimizer",
        StratagemError,
        lambda: Tuner(make()).lr_find(
            type(
                "Mine",
                (BoringModel,),
                {
                    "lr": 0.1,
                    "automatic_optimization": False,
                    "configure_optimizers": returning(lambda one: [one, one]),
                },
            )()
        ),
    ),
    ("Attempted to start read which has already started", ValueError, lambda: started_twice()),
    (
        "Attempting to stop recording an action (read) which was never started",
        ValueError,
        lambda: SimpleProfiler().stop("read"),
    ),
    (
        "Attempting to stop recording an action (write) which was never started",
        ValueError,
        lambda: AdvancedProfiler().stop("write"),
    ),
    (
        "cannot be used with dataloaders passed directly",
        ValueError,
        lambda: Tuner(make()).scale_batch_size(BoringModel(), DataLoader(RandomDataset(32, 4))),
    ),
    (
        "`Tuner.scale_batch_size()` is not supported with distributed strategies",
        ValueError,
        lambda: Tuner(make(devices=2, strategy="ddp")).scale_batch_size(sized()),
    ),
    (
        "Batch size finder is not supported with distributed strategies",
        ValueError,
        lambda: BatchSizeFinder().setup(make(devices=2, strategy="ddp"), sized()),
    ),
    (
        "the model should have one of these fields: lr, learning_rate",
        AttributeError,
        lambda: Tuner(make()).lr_find(BoringModel()),
    ),
    (
        "`mode` should be either of 'power' or 'binsearch', received 'none'",
        ValueError,
        lambda: Tuner(make()).scale_batch_size(sized(), mode="none"),
    ),
    (
        "method 'none' is invalid.",
        ValueError,
        lambda: Tuner(make()).scale_batch_size(sized(), method="none"),
    ),
    ("`mode` can be 'min' or 'max' but got up", ValueError, lambda: EarlyStopping("a", mode="up")),
    (
        "`mode` can be 'min' or 'max' but got up",
        ValueError,
        lambda: ModelCheckpoint(mode="up"),  # type: ignore[arg-type]
    ),
    (
        "`devices` selected with `CPUAccelerator` should be an int > 0.",
        ValueError,
        lambda: make(devices=-1),
    ),
    (
        "`devices` selected with `CPUAccelerator` should be an int > 0.",
        ValueError,
        lambda: Fabric(accelerator="cpu", devices="-1"),
    ),
    (
        "Early stopping conditioned on metric `lost` which is not available. Pass in or modify",
        RuntimeError,
        lambda: fit({"callbacks": EarlyStopping("lost")}),
    ),
    (
        "`ModelCheckpoint(monitor='lost')` could not find the monitored key in the returned",
        StratagemError,
        lambda: fit({"callbacks": ModelCheckpoint(monitor="lost"), "enable_checkpointing": True}),
    ),
    (
        "Invalid value for save_top_k. Must be >= -1",
        ValueError,
        lambda: ModelCheckpoint(save_top_k=-2),
    ),
    (
        "Invalid value for every_n_epochs. Must be >= 0",
        ValueError,
        lambda: ModelCheckpoint(every_n_epochs=-2),
    ),
    (
        "`accumulate_grad_batches` and are using the `GradientAccumulationScheduler`",
        ValueError,
        lambda: make(
            accumulate_grad_batches=2, callbacks=GradientAccumulationScheduler(scheduling={0: 2})
        ),
    ),
    ("10000000000 is not in bounds", ValueError, lambda: seed_everything(10**10)),
    (
        "The provided lr scheduler doesn't follow PyTorch's LRScheduler API",
        UserCodeError,
        lambda: fit(configure_optimizers=returning(lambda one: ([one], [object()]))),
    ),
    (
        "`Trainer(gradient_clip_val=0.1)` and have passed `clip_gradients(gradient_clip_val=0.2)`",
        StratagemError,
        lambda: fit(
            {"gradient_clip_val": 0.1},
            configure_gradient_clipping=lambda self, optimizer, *_: self.clip_gradients(
                optimizer, gradient_clip_val=0.2
            ),
        ),
    ),
    ("Error while merging hparams: ", RuntimeError, with_two_values_of_a_hyperparameter),
    (
        "The 'method' parameter only supports 'script' or 'trace'",
        ValueError,
        lambda: BoringModel().to_torchscript(method="other"),
    ),
    (
        "requires either `example_inputs` or `model.example_input_array`",
        ValueError,
        lambda: BoringModel().to_torchscript(method="trace"),
    ),
    (
        "Lightning attempted to launch new distributed processes with `local_rank > 0`",
        RuntimeError,
        as_rank_1,
    ),
    (
        "parallel_devices set through the strategy",
        StratagemError,
        lambda: DDPStrategy(parallel_devices=[torch.device("cpu")]),
    ),
    ("Unsupported parameter value `hour`", ValueError, lambda: Timer(interval="hour")),
    (
        "Primitives (<class 'bool'>, <class 'int'>, <class 'float'>, <class 'str'>) are not",
        ValueError,
        lambda: BoringModel().save_hyperparameters(3),
    ),
    (
        "You can't `self.log()` here",
        StratagemError,
        lambda: fit(on_train_end=lambda self: self.log("late", 1.0)),
    ),
    ("A model should be passed only once to the `setup` method", ValueError, twice_set_up),
    ("nested dictionaries cannot be logged", StratagemError, lambda: log_with_fabric({"b": 1})),
    (
        "`list` values cannot be logged",
        StratagemError,
        lambda: log_with_fabric([1]),
    ),
    (
        "it cannot be converted to a scalar.",
        StratagemError,
        lambda: log_with_fabric(torch.zeros(2)),
    ),
]


def sized() -> BoringModel:
    model = BoringModel()
    vars(model)["batch_size"] = 2
    return model


@pytest.mark.parametrize(("phrase", "kind", "call"), CASES, ids=[case[0][:40] for case in CASES])
def test_an_error_has_the_phrase_that_users_search_for(
    phrase: str,
    kind: type[Exception],
    call: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StratagemError) as raised:
        call()
    text = str(raised.value)
    assert phrase in text
    assert text.count("Lightning's message: ") == 1
    assert not text.startswith("Lightning")
    assert isinstance(raised.value, kind)


def test_each_phrase_has_a_case_above() -> None:
    for phrase in filter(lambda one: one.theirs, phrases.PHRASES):
        fixed = max(re.split(r"\\\d|METHOD", phrase.theirs), key=len)
        cases: Any = BEGINNINGS if phrase.first else CASES
        assert any(_overlap(case[0], fixed) for case in cases), phrase


def _overlap(one: str, other: str) -> bool:
    """Return whether two texts share 10 characters."""
    return any(one[at : at + 10] in other for at in range(len(one) - 9))


def lengths_from_the_second_time_on() -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=1, samples=2)
    throughput.update(time=2.0, batches=2, samples=4, lengths=8)


BEGINNINGS: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    (
        "Throughput.update(lengths=8): if lengths are passed, there needs to be the same number "
        "of samples",
        RuntimeError,
        lengths_from_the_second_time_on,
    ),
    (
        "Found invalid table_kwargs key: row_limit. This is already a positional argument of the "
        "Profiler. PyTorchProfiler(table_kwargs=",
        KeyError,
        lambda: PyTorchProfiler(table_kwargs={"row_limit": None}),
    ),
    (
        "Found invalid table_kwargs key: size. PyTorchProfiler(table_kwargs=",
        KeyError,
        lambda: PyTorchProfiler(table_kwargs={"size": None}),
    ),
]


@pytest.mark.parametrize(("begin", "kind", "call"), BEGINNINGS)
def test_an_error_in_lightnings_words_is_of_its_kind(
    begin: str, kind: type[Exception], call: Callable[[], Any]
) -> None:
    with pytest.raises(StratagemError) as raised:
        call()
    assert isinstance(raised.value, kind)
    assert raised.value.args[0].startswith(begin)


def test_an_optimizer_is_set_up_once() -> None:
    fabric, model = Fabric(accelerator="cpu", devices=1), torch.nn.Linear(1, 1)
    _, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigurationError, match="An optimizer should be passed only once"):
        fabric.setup(torch.nn.Linear(1, 1), optimizer)
    with pytest.raises(ConfigurationError, match="once to the `setup_optimizers` method"):
        fabric.setup_optimizers(optimizer)


def test_fabric_launch_refuses_other_objects_than_functions() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="the first argument needs to be a callable"):
        fabric.launch(3)
    with pytest.raises(TypeError, match="the function needs to take at least one argument"):
        fabric.launch(lambda: None)


def test_the_margin_of_a_binary_search_is_taken_off_as_in_lightning() -> None:
    class Sized(BoringModel):
        batch_size = 2

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(RandomDataset(32, 64), self.batch_size)

    options: dict[str, Any] = {"mode": "binsearch", "init_val": 4, "max_trials": 2}
    assert Tuner(make()).scale_batch_size(Sized(), **options) == 7  # 95 % of 8
    assert Tuner(make()).scale_batch_size(Sized(), **options, margin=0.0) == 8
    assert Tuner(make()).scale_batch_size(Sized(), **{**options, "mode": "power"}) == 8


def test_configuration_error_keeps_its_message_in_lr_find() -> None:
    with pytest.raises(ConfigurationError, match="0 < min_lr < max_lr") as raised:
        Tuner(make()).lr_find(sized(), min_lr=1.0, max_lr=0.1)
    assert "is invalid" not in str(raised.value)


def test_a_tuner_and_a_finder_exclude_one_another() -> None:
    with pytest.raises(ConfigurationError, match="already configured with a `BatchSizeFinder`"):
        Tuner(make(callbacks=BatchSizeFinder())).scale_batch_size(BoringModel())
    with pytest.raises(ConfigurationError, match="already configured with a `LearningRateFinder`"):
        Tuner(make(callbacks=LearningRateFinder())).lr_find(BoringModel())
