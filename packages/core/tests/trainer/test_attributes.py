"""Attributes that users type: they exist and are typed, or an error says what to use instead."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import RunScript
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Callback, DataModule, Lite, Module, Trainer
from stratagem.callbacks import EarlyStopping
from stratagem.discovery.absent import remedies
from stratagem.errors import ConfigurationError, StratagemError, UserCodeError
from stratagem.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

LIGHTNING = Path(__file__).parents[1] / "files/lightning_attributes.txt"
"""Public names of Lightning 2.6.6; packages/lightning/scripts/attributes.py writes them."""


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batches: int = 3) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(2 * batches, 1), 2)  # type: ignore[arg-type]


def trainer(**options: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    return Trainer(**{**defaults, **options})


def of_lightning() -> list[tuple[str, str]]:
    lines = (line.split(": ") for line in LIGHTNING.read_text().splitlines())
    return [(kind, name) for kind, names in lines for name in names.split()]


OWNERS: dict[str, Any] = {
    "Trainer": trainer(),
    "Fabric": Lite(accelerator="cpu", devices=1),
    "Strategy": DDPStrategy(accelerator="cpu"),
    "LightningModule": Net(),
    "LightningDataModule": DataModule(),
    "Callback": Callback(),
}


def advice(owner: object, name: str) -> str:
    """Return what an error says about a missing attribute; "exists" if there is no such error."""
    try:
        getattr(owner, name)
    except AttributeError as error:
        return str(error).partition(". ")[2]
    except StratagemError:
        pass  # a property of a run, such as Module.trainer
    return "exists"


@pytest.mark.parametrize("kind", OWNERS)
def test_lightning_attribute_exists_or_names_its_counterpart(kind: str) -> None:
    names = [name for of, name in of_lightning() if of == kind]
    found = {name: advice(OWNERS[kind], name) for name in names}
    bare = [name for name, text in found.items() if not text or "Did you mean" in text]
    assert bare == []


def test_the_list_of_lightnings_attributes_is_whole() -> None:
    assert len(of_lightning()) > 350


def test_each_argument_of_the_trainer_is_an_attribute_with_the_value_in_force() -> None:
    one = trainer(max_epochs=3, precision="bf16-mixed", gradient_clip_val=0.5, max_time=60)
    missing = [name for name in inspect.signature(Trainer).parameters if not hasattr(one, name)]
    assert missing == []
    assert (one.max_epochs, one.precision, one.gradient_clip_val) == (3, "bf16-mixed", 0.5)
    assert (one.max_time, one.min_steps, one.fast_dev_run) == (60.0, 0, 0)
    assert (one.gradient_clip_algorithm, one.sync_batchnorm, one.compile) == ("norm", False, None)
    assert (one.num_nodes, one.num_devices, one.device_ids, one.devices) == (1, 1, [0], [0])
    assert (one.accelerator.name, one.node_rank, one.async_save) == ("cpu", 0, False)
    assert one.default_root_dir == Path.cwd()
    assert one.plugins == [
        one.strategy.checkpoint_io,
        one.strategy.cluster_environment,
        one.precision_plugin,
    ]
    assert not any((one.enable_checkpointing, one.enable_progress_bar, one.enable_model_summary))
    full = trainer(enable_checkpointing=True, enable_progress_bar=True)
    assert full.enable_checkpointing
    assert full.enable_progress_bar
    assert full.progress_bar_callback is full.callbacks[0]


def test_accumulate_grad_batches_follows_the_current_epoch() -> None:
    seen: list[int] = []

    class Notes(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
            seen.append(trainer.accumulate_grad_batches)

    trainer(max_epochs=2, accumulate_grad_batches={0: 2, 1: 3}, callbacks=Notes()).fit(
        Net(), data()
    )
    assert seen == [2, 3]


class Watches(Callback):
    """Notes the state of the Trainer in each hook."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}
        self.last: list[bool] = []

    def _note(self, hook: str, trainer: Trainer) -> None:
        names = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
        self.seen[hook] = [name for name in names if getattr(trainer, name)]

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._note("fit", trainer)

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        self._note("sanity", trainer)

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        self.last.append(trainer.is_last_batch)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note("sanity" if trainer.sanity_checking else "validation", trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note("train", trainer)
        assert trainer.is_last_batch == self.last[-1]

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._note("test", trainer)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._note("predict", trainer)


def test_the_stage_the_last_batch_and_the_numbers_of_batches() -> None:
    watch, stops = Watches(), EarlyStopping("loss/dataloader_idx_0")
    one = trainer(max_epochs=1, limit_test_batches=2, callbacks=[watch, stops])
    assert (one.num_val_batches, one.num_sanity_val_batches, one.is_last_batch) == ([], [], False)
    model = Net()
    one.fit(model, data(), [data(1), data(4)])
    assert (one.num_training_batches, one.num_val_batches) == (3, [1, 4])
    assert one.num_sanity_val_batches == [1, 2]
    one.test(model, data())
    assert (one.num_test_batches, one.num_predict_batches) == ([2], [])
    one.predict(model, data(4))
    assert one.num_predict_batches == [4]
    assert (len(one.predict_dataloaders), one.test_dataloaders) == (4, None)
    assert watch.seen == {
        "fit": ["training"],
        "sanity": ["sanity_checking"],
        "train": ["training"],
        "validation": ["validating", "evaluating"],
        "test": ["testing", "evaluating"],
        "predict": ["predicting"],
    }
    assert watch.last == [False, False, True]
    assert (one.early_stopping_callback, one.early_stopping_callbacks) == (stops, [stops])
    assert not any((one.training, one.interrupted, one.received_sigterm))
    assert one.enable_validation is False  # the last run had no validation
    assert one.ckpt_path is None


def test_configure_optimizers_reads_max_epochs_of_the_trainer() -> None:
    class Cosine(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            epochs = self.trainer.max_epochs
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]

    one = trainer(max_epochs=2)
    one.fit(Cosine(), data())
    assert one.lr_scheduler_configs[0].scheduler.get_last_lr() == [pytest.approx(0.0)]


def test_should_stop_can_be_set() -> None:
    one = trainer()
    one.should_stop = True
    assert one.should_stop


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_epochs",
            r"max_epochs is read-only. Pass max_epochs= to the Trainer, or set ",
        ),
        ("gradient_clip_val", "Pass gradient_clip_val= to the Trainer$"),
        ("current_epoch", r"read-only. A fit counts from 0, and trainer.fit\(..., ckpt_path=...\)"),
        ("logger", "Set trainer.loggers to a list"),
        ("is_last_batch", "is read-only. A run sets it"),
        ("fit_loop", "Trainer.fit_loop does not exist. Use trainer.max_epochs"),
        ("max_epoch", "Trainer.max_epoch does not exist. Did you mean 'max_epochs'?"),
        ("shoud_stop", "Did you mean 'should_stop'?"),
    ],
)
def test_read_only_attributes_name_the_alternative(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        setattr(trainer(), name, 3)


def test_a_users_own_attribute_can_be_set() -> None:
    one: Any = trainer()
    one.notes = one.best_score = 3
    one.notes += 1
    assert one.notes == 4


def test_unknown_attributes_name_the_right_one() -> None:
    one: Any = trainer()
    with pytest.raises(
        AttributeError, match=r"has no attribute 'fit_loop'. Use trainer.max_epochs"
    ):
        one.fit_loop.max_epochs = 3
    with pytest.raises(AttributeError, match=r"Did you mean 'global_step'?"):
        _ = one.global_steps
    with pytest.raises(AttributeError, match=r"'Lite' object .* Did you mean 'world_size'?"):
        _ = OWNERS["Fabric"].word_size
    with pytest.raises(AttributeError, match=r"Use trainer.lr_scheduler_configs"):
        _ = one.strategy.lr_scheduler_configs
    with pytest.raises(AttributeError, match=r"Did you mean 'train_dataloader'?"):
        _ = OWNERS["LightningDataModule"].train_datalaoder
    with pytest.raises(
        AttributeError, match=r"'DDPStrategy' .* 'ranks'. A Trainer or Lite sets it"
    ):
        _ = OWNERS["Strategy"].world_size


def test_the_error_of_a_property_is_its_own() -> None:
    class Broken(Lite):
        @property
        def lost(self) -> int:
            return {}.nothing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'dict' object has no attribute 'nothing'"):
        _ = Broken(accelerator="cpu").lost


def test_the_error_of_a_missing_attribute_leaves_its_process() -> None:
    try:
        _ = OWNERS["Trainer"].lightning_module
    except AttributeError as error:
        again = pickle.loads(pickle.dumps(error))
    assert str(again).endswith("Use trainer.model")


def test_a_missing_attribute_of_a_module_is_explained_within_a_run() -> None:
    class Misspelled(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.lightning_module(batch)  # type: ignore[operator]

    with pytest.raises(AttributeError, match=r"no attribute 'lightning_module'. Use self"):
        trainer(max_epochs=1).fit(Misspelled(), data())


def test_a_table_entry_is_one_sentence_of_a_name_that_does_not_exist() -> None:
    kinds = {kind.__name__: kind for kind in (Trainer, Lite, Strategy, DataModule)}
    for key, advice in remedies().items():
        kind, _, name = key.partition(".")
        assert advice.endswith("=...") or advice[-1].isalnum() or advice[-1] in ")]"
        if kind in kinds and not name.endswith("="):
            own = inspect.getattr_static(kinds[kind], name, None)
            # stratagem_lightning adds methods for users to call by `super()`.
            assert own is None or hasattr(own, "for_users"), key


FORMER = {
    "Trainer": "accumulation agreed_time backward batches_that_trained checkpoint_root "
    "has_validation last_run loggers_of_this_rank metric run_id wrapped_optimizers",
    "Fabric": "is_launched join",
    "LightningDataModule": "hyper_parameters",
}
"""Names that earlier versions of Stratagem had, by the kind of their owner."""


@pytest.mark.parametrize("kind", FORMER)
def test_former_attribute_names_its_successor(kind: str) -> None:
    found = {name: advice(OWNERS[kind], name) for name in FORMER[kind].split()}
    assert {name for name, text in found.items() if not text.startswith("Use ")} == set()


@pytest.mark.parametrize(
    ("kind", "argument", "says"),
    [
        (Trainer, "gpus", "Write accelerator='gpu', devices=... instead"),
        (Trainer, "tpu_cores", "Write accelerator='tpu', devices=... instead"),
        (Trainer, "barebones", "Write enable_checkpointing=False, logger=False"),
        (Lite, "gradient_accumulation_steps", "Write accumulate_grad_batches=... instead"),
    ],
)
def test_argument_of_another_library_names_its_counterpart(
    kind: Any, argument: str, says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        kind(**{argument: 1})


def test_a_former_name_of_a_module_is_explained_within_a_run() -> None:
    class Former(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.hyper_parameters

    with pytest.raises(AttributeError, match=r"no attribute 'hyper_parameters'. Use self.hparams"):
        trainer(max_epochs=1).fit(Former(), data())


class OwnNames(SingleDeviceStrategy):
    """Uses names that users read of other strategies for something else."""

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.world_size = 7
        self.model = None

    def reduce(self, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_strategy_may_have_the_names_that_users_read() -> None:
    one = trainer(max_epochs=1, strategy=OwnNames())
    one.fit(Net(), data())
    strategy: Any = one.strategy
    assert (strategy.world_size, strategy.model, one.world_size) == (7, None, 1)
    assert strategy.reduce(torch.ones(())) == 2
    assert copy.deepcopy(OwnNames()).world_size == 7


def test_a_strategy_shows_the_model_and_the_optimizers_of_a_run() -> None:
    one, model = trainer(max_epochs=1), Net()
    assert (one.strategy.model, one.strategy.optimizers) == (None, [])
    one.fit(model, data())
    assert one.strategy.model is model
    assert one.strategy.optimizers == one.optimizers


NAMES = """
import torch
from stratagem import Lite, Module, Trainer
from stratagem.errors import ConfigurationError

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        strategy.barrier()
        strategy.barrier("with a name")
        rank = torch.tensor(float(strategy.global_rank))
        assert strategy.reduce(rank) == strategy.reduce(rank, reduce_op="avg") == 0.5
        assert strategy.all_reduce(1, reduce_op=torch.distributed.ReduceOp.SUM) == 2
        assert strategy.all_gather(rank).tolist() == [0.0, 1.0]
        assert strategy.broadcast(strategy.local_rank + 5, src=1) == 6
        assert strategy.reduce_boolean_decision(strategy.is_global_zero) is False
        assert strategy.reduce_boolean_decision(strategy.is_global_zero, all=False) is True
        assert (strategy.world_size, strategy.node_rank) == (2, 0)
        assert strategy.root_device == torch.device("cpu")
        assert isinstance(strategy.model, torch.nn.parallel.DistributedDataParallel)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 1), 2))
order = []
lite = Lite(accelerator="cpu", strategy="ddp", devices=2)
lite.launch()
with lite.rank_zero_first():
    order.append(lite.global_rank)
model = lite.setup_module(torch.nn.Linear(1, 1))
optimizer = lite.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
lite.backward(model(torch.ones(1, 1)).sum())
optimizer.step()
print("right", lite.global_rank)
"""


def test_names_of_ranks_and_models_on_two_ranks(run_script: RunScript) -> None:
    done = run_script(NAMES)
    assert sorted(done.stdout.splitlines())[-2:] == ["right 0", "right 1"]


def test_the_device_of_a_loaded_model_is_a_dict_or_a_function_too(tmp_path: Path) -> None:
    one = trainer(max_epochs=1)
    one.fit(Net(), data())
    one.save_checkpoint(path := tmp_path / "net.ckpt")
    for place in (
        {"cuda:0": "cpu"},
        {"cpu": "meta"},
        lambda storage, _: storage,
        torch.device("cpu"),
    ):
        device = "meta" if place == {"cpu": "meta"} else "cpu"
        assert Net.load_from_checkpoint(path, map_location=place).device.type == device
    for wrong in (3.5, "gpu", {"cpu": [1]}, int):
        with pytest.raises(UserCodeError, match=r"map_location=.*: expected a device such as"):
            Net.load_from_checkpoint(path, map_location=wrong)


def test_a_collective_of_some_ranks_is_refused() -> None:
    strategy = trainer().strategy
    with pytest.raises(ConfigurationError, match="group='some': expected None"):
        strategy.all_gather(torch.ones(1), group="some")
    with pytest.raises(ConfigurationError, match="reduce_op='product': expected one of mean, avg"):
        strategy.reduce(torch.ones(1), reduce_op="product")


def test_names_of_lightnings_module() -> None:
    model: Any = Net()
    assert (model.on_gpu, model.fabric, model.CHECKPOINT_HYPER_PARAMS_KEY) == (
        False,
        None,
        "hyper_parameters",
    )
    with pytest.raises(UserCodeError, match=r"torch_tensorrt.compile"):
        model.to_tensorrt()
    with pytest.raises(UserCodeError, match="is called configure_model"):
        model.configure_sharded_model()
    trainer(max_epochs=1).fit(model, data())
    assert model.device_mesh is None


def test_lite_logs_and_creates_tensors() -> None:
    class Records:
        rows: list[Any] = []  # noqa: RUF012

        def log_metrics(self, values: Any, step: Any) -> None:
            self.rows.append((values, step))

    logger = Records()
    lite = Lite(accelerator="cpu", precision="bf16-true", loggers=logger)
    assert (lite.loggers, lite.logger, Lite(accelerator="cpu").logger) == ([logger], logger, None)
    lite.log("loss", torch.ones(()), 3)
    assert logger.rows == [({"loss": 1.0}, 3)]
    row: Any = {"loss": 1.0}
    with pytest.raises(ConfigurationError, match=r"received a dict: use lite.log_dict\(values"):
        lite.log(row, 3)
    with lite.init_tensor():
        assert torch.ones(1).dtype == torch.bfloat16
    assert (lite.precision, lite.accelerator.name, lite.num_devices) == ("bf16-true", "cpu", 1)
