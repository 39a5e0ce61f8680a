"""What libraries override and read of Lightning's private parts works as there."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stratagem import Callback
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.loggers import Logger as FabricLogger
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.stochastic_weight_averaging import (
    StochasticWeightAveraging,
)
from stratagem_lightning.api.core.connectors import CallbackConnector
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.loggers import CSVLogger, Logger
from stratagem_lightning.api.strategies.single_device import SingleDeviceStrategy
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities import argparse, imports, loading, logging
from stratagem_lightning.api.utilities.models import maybe_unwrap_optimized

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 3,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, "enable_checkpointing": False, **options})


class WithExport(ModelCheckpoint):
    """Keeps a file beside each checkpoint, and ranks checkpoints by a value of its own."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        Path(f"{filepath}.export").touch()

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        Path(f"{filepath}.export").unlink()

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        own = {"own": torch.tensor(float(trainer.current_epoch))}
        return {**super()._monitor_candidates(trainer), **own}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["epoch=2-step=6.ckpt"]),
        ({"save_last": True}, ["epoch=2-step=6.ckpt", "last.ckpt"]),
        (
            {"monitor": "own", "mode": "max", "save_top_k": 2, "filename": "{own:.0f}"},
            ["own=1.ckpt", "own=2.ckpt"],
        ),
    ],
)
def test_a_checkpoint_callback_that_saves_and_removes_more_is_called(
    options: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    saver = WithExport(tmp_path, **options)
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    beside = [f"{name}.export" for name in kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *beside])
    assert saver._last_checkpoint_saved == str(tmp_path / kept[-1])


def test_a_link_to_the_last_checkpoint_is_no_save(tmp_path: Path) -> None:
    saver = WithExport(tmp_path, save_last="link")
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    assert (tmp_path / "last.ckpt").is_symlink()
    assert not (tmp_path / "last.ckpt.export").exists()


def test_a_checkpoint_callback_may_write_a_folder_of_its_own(tmp_path: Path) -> None:
    class Adapter(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            Path(filepath).mkdir()
            (Path(filepath) / "adapter.bin").touch()
            self._last_global_step_saved = trainer.global_step

    saver = Adapter(tmp_path, every_n_train_steps=2)
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=2-step=6.ckpt"]
    assert (Path(saver.best_model_path) / "adapter.bin").exists()
    assert (saver._every_n_train_steps, saver._every_n_epochs) == (2, 0)


class Values(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", (3.0, 1.0, 2.0, 0.5)[self.current_epoch])


class Late(ModelCheckpoint):
    """Saves no best one in the first epoch, and notes its last checkpoints."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[Any] = []

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if trainer.current_epoch > 0:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        super()._save_last_checkpoint(trainer, monitor_candidates)
        self.seen.append((int(monitor_candidates["step"]), Path(self.last_model_path).name))


class WithoutLast(Late):
    """Has its own way to keep the last checkpoint."""

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
        else:
            self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        self.seen.append((int(monitor_candidates["step"]), sorted(self.best_k_models.values())))


BEST, LAST = "epoch=3-step=8.ckpt", "last.ckpt"


@pytest.mark.parametrize(
    ("kind", "options", "files", "seen"),
    [
        (Late, {"monitor": "value"}, [BEST], [(4, ""), (8, "")]),
        (Late, {"monitor": "value", "save_last": True}, [BEST, LAST], [(4, LAST), (8, LAST)]),
        (
            Late,
            {"every_n_train_steps": 2, "save_last": True},
            [BEST, LAST],
            [(2, LAST), (4, LAST), (6, LAST), (8, LAST)],
        ),
        (
            WithoutLast,
            {"monitor": "value", "save_last": True, "save_top_k": 2},
            ["epoch=1-step=4.ckpt", BEST],
            [(2, [3.0]), (4, [1.0, 3.0]), (6, [1.0, 2.0]), (8, [0.5, 1.0])],
        ),
        (WithoutLast, {"save_last": True}, [BEST], [(2, []), (4, []), (6, []), (8, [])]),
    ],
)
def test_the_best_and_the_last_checkpoint_are_saved_by_methods_of_ones_own(
    kind: type[Late], options: dict[str, Any], files: list[str], seen: list[Any], tmp_path: Path
) -> None:
    """Files and calls are those of Lightning 2.6.6."""
    saver = kind(tmp_path, **options)
    quiet(callbacks=saver, enable_checkpointing=True, max_epochs=4).fit(Values())
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert saver.seen == seen
    assert Path(saver.best_model_path).name == BEST


def test_a_last_checkpoint_without_a_best_one_is_a_file_of_its_own(tmp_path: Path) -> None:
    class OnlyLast(ModelCheckpoint):
        def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
            pass

    saver = OnlyLast(tmp_path, every_n_train_steps=2, save_last=True)
    saver.CHECKPOINT_NAME_LAST = "last-{step}"
    quiet(callbacks=saver, enable_checkpointing=True).fit(Values())
    assert [path.name for path in tmp_path.iterdir()] == ["last-step=6.ckpt"]
    assert torch.load(saver.last_model_path, weights_only=True)["global_step"] == 6


class Loader:
    """No DataLoader: draws its order for each iterator."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.asked.append(self.name)
        return iter(torch.randn(2, 1, 32))


class OwnIterator(Loader):
    """Is its own iterator, and begins anew when an iterator is asked for."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.left = [*super().__iter__()]
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        return self.left.pop()


@pytest.mark.parametrize("kind", [Loader, OwnIterator])
@pytest.mark.parametrize(
    ("sanity", "order"),
    [
        (2, ["val", "val", "train", "train", "val", "train", "val"]),
        (0, ["train", "train", "val", "val", "train", "val"]),
    ],
)
def test_custom_loader_classes_make_the_iterators_of_lightning(
    sanity: int, order: list[str], kind: type[Loader]
) -> None:
    asked: list[str] = []
    trainer = quiet(max_epochs=2, num_sanity_val_steps=sanity)
    trainer.fit(BoringModel(), kind("train", asked), kind("val", asked))
    assert asked == order
    asked.clear()
    trainer.test(BoringModel(), kind("test", asked), verbose=False)
    assert asked == ["test", "test"]


def test_stochastic_weight_averaging_exposes_its_start() -> None:
    seen = []

    class Average(StochasticWeightAveraging):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            seen.append((self._initialized, self.swa_start, self.swa_end))
            super().on_train_epoch_start(trainer, module)

    average = Average(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=1)
    quiet(callbacks=average).fit(BoringModel())
    assert seen == [(False, 1, 2), (False, 1, 2), (True, 1, 2)]
    assert (average._swa_epoch_start, average._swa_lrs) == (2, [1e-2])
    assert average._latest_update_epoch == 2
    endless = quiet(callbacks=average, max_epochs=-1, max_steps=1)
    endless.fit(BoringModel())
    assert average.swa_end == float("inf")

    class Longer(StochasticWeightAveraging):
        swa_end = 7

    with pytest.raises(UserCodeError, match="Longer overrides swa_end of StochasticWeightAver"):
        quiet(callbacks=Longer(swa_lrs=1e-2)).fit(BoringModel())


def test_a_model_without_first_values_draws_no_random_numbers() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    strategy = SingleDeviceStrategy("cpu")
    for context in (fabric.init_module, strategy.module_init_context):
        torch.manual_seed(3)
        with context(empty_init=True):
            layer = torch.nn.Linear(4, 4)
        assert torch.initial_seed() == 3
        drawn = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(1), drawn)
        with context():
            layer = torch.nn.Linear(4, 4)
        torch.manual_seed(3)
        torch.rand(1)
        assert torch.equal(layer.weight, torch.nn.Linear(4, 4).weight)


@pytest.mark.parametrize(("summary", "number"), [(True, 0.7065830231), (False, 0.5373074412)])
def test_the_forward_for_the_summary_draws_random_numbers(summary: bool, number: float) -> None:
    """The numbers are those of Lightning 2.6.6."""
    drawn = []

    class Noisy(BoringModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand(x.shape))  # type: ignore[no-any-return]

        def on_train_start(self) -> None:
            drawn.append(torch.rand(1).item())

    model = Noisy()
    model.example_input_array = torch.ones(1, 32)
    torch.manual_seed(3)
    loader: DataLoader[Any] = DataLoader(torch.ones(1, 32))  # type: ignore[arg-type]
    quiet(enable_model_summary=summary).fit(model, loader)
    assert drawn == [pytest.approx(number, abs=1e-9)]


@pytest.mark.parametrize(("summary", "count"), [(True, 3), (False, 0)])
def test_an_example_that_is_drawn_is_drawn_as_often(summary: bool, count: int) -> None:
    """The counts are those of Lightning 2.6.6."""
    drawn: list[torch.Tensor] = []

    class Drawing(BoringModel):
        @property
        def example_input_array(self) -> torch.Tensor:
            drawn.append(torch.rand(1, 32))
            return drawn[-1]

    quiet(enable_model_summary=summary, max_epochs=1).fit(Drawing())
    assert len(drawn) == count


def test_a_logger_of_fabric_and_of_the_trainer_gets_lightnings_steps() -> None:
    """The steps are those of Lightning 2.6.6; dvclive looks for the name of the caller."""
    rows: list[Any] = []
    callers: set[str] = set()

    class Fabrics(FabricLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            rows.append((*(name for name in metrics if name != "epoch"), step))
            theirs = {"update_train_step_metrics", "update_train_epoch_metrics"}
            callers.update(theirs & {frame.function for frame in inspect.stack()})

    class Both(Logger, Fabrics):
        """As dvclive's."""

    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 2.0)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", 3.0)

    options: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 1, "limit_test_batches": 1}
    trainer = quiet(logger=Both(), **options)
    assert isinstance(trainer.logger, Logger)
    assert isinstance(Fabrics(), Logger)
    assert not isinstance(Fabrics(), Both)
    assert not isinstance(object(), FabricLogger)
    assert not isinstance(object(), Logger)
    model = Logging()
    trainer.fit(model)
    trainer.test(model)
    trainer.validate(model)
    assert rows == [("train", 0), ("train", 1), ("val", 1), ("test", 2), ("val", 2)]
    assert callers == {"update_train_step_metrics"}


def test_a_value_named_step_is_not_the_step_of_a_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "logs", 0)
    logger.log_metrics({"loss": 1.0, "step": 7}, step=3)
    logger.save()
    assert Path(logger.metrics_file_path).read_text().split() == ["step,loss", "3,1.0"]


def test_hyperparameters_are_set_by_the_private_method() -> None:
    model = BoringModel()
    model._set_hparams({"depth": 2, "width": 8})
    model._set_hparams(Namespace(depth=3))
    assert model.hparams == {"depth": 3, "width": 8}

    class Doubled(BoringModel):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def _set_hparams(self, hp: Any) -> None:
            super()._set_hparams({name: 2 * value for name, value in hp.items()})

    assert Doubled(4).hparams == {"width": 8}


def test_hyperparameters_are_flattened_and_made_plain() -> None:
    @dataclass
    class Size:
        width: int = 3

    nested = {"size": Size(), "more": Namespace(a=1), "layers": [{"b": 2}, {"c": 3}], 5: [1]}
    assert logging.flatten_dict(nested) == {
        "size/width": 3,
        "more/a": 1,
        "layers/0/b": 2,
        "layers/1/c": 3,
        "5": [1],
    }
    assert logging.flatten_dict({"a": {"b": 1}}, ".") == {"a.b": 1}
    assert logging.convert_params(Namespace(a=1)) == {"a": 1}
    assert (logging.convert_params(None), logging.convert_params({"b": 2})) == ({}, {"b": 2})
    called = logging.sanitize_callable_params({"a": len, "b": lambda: len, "c": 1, "d": Size})
    assert called == {"a": "len", "b": "<lambda>", "c": 1, "d": "Size"}
    assert logging.sanitize_params({"a": [1], "b": None}) == {"a": "[1]", "b": "None"}
    assert logging.convert_json_serializable({"a": {1}, "b": None}) == {"a": "{1}", "b": None}
    assert logging.add_prefix({"a": 1}, "", "-") == {"a": 1}
    versions = [SimpleNamespace(version=one) for one in (1, "b", 1)]
    assert (logging.version_of(versions[:1]), logging.version_of(versions)) == (1, "1_b")


def test_checkpoints_that_were_not_uploaded_are_found(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="own", save_top_k=2, save_last=True)
    saver.__class__ = WithExport
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    found = logging.scan_checkpoints(saver, {})
    assert {(Path(path).name, tag) for _, path, _, tag in found} == {
        ("last.ckpt", "latest"),
        ("epoch=0-step=2.ckpt", "best_k"),
        ("epoch=1-step=4.ckpt", "best_k"),
    }
    times = {path: time for time, path, _, _ in found}
    assert logging.scan_checkpoints(saver, times) == []


def test_arguments_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        @argparse.defaults_from_env_vars
        def __init__(self, width: int = 1, name: str = "", rate: float = 0.1) -> None:
            self.seen = (width, name, rate)

    monkeypatch.setenv("PL_MODEL_WIDTH", "42")
    monkeypatch.setenv("PL_MODEL_NAME", "a b")
    assert argparse.parse_env_variables(Model) == Namespace(width=42, name="a b")
    assert Model(7, rate=0.5).seen == (7, "a b", 0.5)
    assert Model().seen == (42, "a b", 0.1)


def test_versions_of_torch_are_compared() -> None:
    assert imports._TORCH_GREATER_EQUAL_2_4
    assert not vars(imports).get("_TORCH_GREATER_EQUAL_2_4")
    assert not imports._TORCH_GREATER_EQUAL_99_0
    with pytest.raises(AttributeError, match="no attribute '_TORCH_LESS'"):
        _ = imports._TORCH_LESS


def test_files_of_torch_are_written_whole_and_read(tmp_path: Path) -> None:
    assert loading.is_local_file_protocol(tmp_path)
    assert not loading.is_local_file_protocol("s3://bucket/logs")
    loading.atomic_save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert loading.load(tmp_path / "a.pt")["a"] == 1
    with (tmp_path / "a.pt").open("rb") as file:
        assert loading.load(file, map_location="cpu")["a"] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_is_unwrapped() -> None:
    model = BoringModel()
    assert maybe_unwrap_optimized(model) is model
    assert maybe_unwrap_optimized(torch.compile(model)) is model
    with pytest.raises(TypeError, match=r"must be a `LightningModule` or .*, got `Linear`"):
        maybe_unwrap_optimized(torch.nn.Linear(1, 1))


class Reader(Callback):
    """Evaluates expressions of a Trainer `t` in each hook of a batch and of an epoch's end."""

    def __init__(self, *expressions: str) -> None:
        self.expressions = expressions
        self.seen: list[Any] = []

    def read(self, trainer: Any) -> None:
        self.seen.append([eval(one, {"t": trainer}) for one in self.expressions])

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.read(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.read(trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.read(trainer)


def test_private_numbers_of_the_loops_are_lightnings() -> None:
    """The numbers are those of Lightning 2.6.6."""
    reader = Reader(
        "t.fit_loop.epoch_loop._batches_that_stepped",
        "t._logger_connector.should_update_logs",
        "t.fit_loop._should_accumulate()",
    )
    trainer = quiet(
        callbacks=reader,
        max_epochs=1,
        limit_train_batches=5,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
    )
    trainer.fit(BoringModel())
    assert reader.seen == [
        [0, False, True],
        [0, False, True],
        [0, False, False],
        [0, False, False],
        [1, True, True],
        [1, True, True],
        [1, True, False],
        [1, True, False],
        [2, False, False],
        [2, False, False],
        [3, True, False],
    ]
    loop: Any = trainer.fit_loop.epoch_loop
    with pytest.warns(UserWarning, match=r"_batches_that_stepped = 7 has no effect: a run that"):
        loop._batches_that_stepped = 7
    assert trainer.fit_loop._can_stop_early
    assert trainer.fit_loop.epoch_loop._is_training_done


class ReaderAtEnd(Reader):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        pass

    on_train_batch_end = on_train_batch_start


def test_private_trainer_attributes_are_views() -> None:
    reader = ReaderAtEnd(
        "sorted(t._checkpoint_connector.dump_checkpoint())",
        "sorted(t._checkpoint_connector.dump_checkpoint(True).keys() & {'loops', 'state_dict'})",
        "len(t.fit_loop._combined_loader.flattened)",
        "t.fit_loop._data_source.is_module()",
        "t.fit_loop._data_source.instance is t.model",
        "len(t._data_connector._train_dataloader_source.dataloader())",
        "t._data_connector._val_dataloader_source.instance is t.model",
        "t._data_connector._datahook_selector.datamodule",
        "t._evaluation_loop.num_dataloaders",
        "t._evaluation_loop._results.DATALOADER_SUFFIX",
        "sorted(t._results.metrics(True))",
        "t._active_loop.__class__.__name__",
        "t._logger_connector.callback_metrics == t.callback_metrics",
        "t._logger_connector.logged_metrics == t.logged_metrics",
        "t._logger_connector.progress_bar_metrics == t.progress_bar_metrics",
        "t._signal_connector.received_sigterm",
        "t.fit_loop.setup_data()",
        "t.fit_loop.epoch_loop._should_check_val_epoch()",
        "len(t._evaluation_loop._combined_loader.flattened)",
    )
    trainer: Any = quiet(callbacks=reader, max_epochs=1)
    trainer.fit(BoringModel())
    written, *others = reader.seen[0]
    assert {"state_dict", "loops", "optimizer_states", "lr_schedulers", "epoch"} <= set(written)
    assert others == [
        ["state_dict"],
        *(1, True, True, 64, True, None, 1, "/dataloader_idx_{}", ["callback", "log", "pbar"]),
        *("FitLoop", True, True, True, False, None, True, 1),
    ]
    assert trainer._data_connector._test_dataloader_source.is_defined()
    with pytest.raises(ConfigurationError, match=r"setup_data\(\) works within a fit, once its"):
        quiet().fit_loop.setup_data()
    assert not quiet()._data_connector._predict_dataloader_source.is_defined()
    with pytest.raises(AttributeError) as raised:
        trainer._data_connector.attach_data()
    assert str(raised.value) == (
        "trainer._data_connector has no 'attach_data' in Stratagem; expected one of "
        "_datahook_selector, _predict_dataloader_source, _test_dataloader_source, "
        "_train_dataloader_source, _val_dataloader_source; use trainer.train_dataloader, "
        "val_dataloaders and datamodule"
    )


def test_values_are_logged_through_the_private_connector(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "logs", 0)
    trainer: Any = quiet(logger=logger)
    trainer._logger_connector.log_metrics({"loss": 1.0}, step=3)
    logger.save()
    assert Path(logger.metrics_file_path).read_text().split() == ["step,loss", "3,1.0"]


def test_the_table_of_a_test_can_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    class Silent(Callback):
        def on_test_start(self, trainer: Any, module: Any) -> None:
            trainer._evaluation_loop._print_results = lambda *arguments: print("own table")

    trainer: Any = quiet(callbacks=Silent())
    trainer.test(BoringModel())
    assert capsys.readouterr().out.strip().endswith("own table")


def test_evaluation_loop_exposes_verbose() -> None:
    """The values are those of Lightning 2.6.6."""
    told = []

    class Telling(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            told.append(trainer._evaluation_loop.verbose)

        on_test_end = on_validation_end

    trainer: Any = quiet(callbacks=Telling(), max_epochs=1)
    model = BoringModel()
    trainer.fit(model)
    for verbose in (True, False):
        trainer.validate(model, verbose=verbose)
        trainer.test(model, verbose=verbose)
    assert told == [False, True, True, False, False]


def test_a_connector_of_ones_own_chooses_the_default_callbacks() -> None:
    class Own(Callback):
        pass

    class Connector(CallbackConnector):
        def _configure_progress_bar(self, enable_progress_bar: bool = True) -> None:
            self.trainer.callbacks.append(Own())
            super()._configure_progress_bar(enable_progress_bar)

    class Mine(Trainer):
        @property
        def _callback_connector(self) -> Any:
            return self._own_connector

        @_callback_connector.setter
        def _callback_connector(self, value: Any) -> None:
            self._own_connector = Connector(self)

    for enabled, names in ((True, {"Own", "RichProgressBar"}), (False, {"Own"})):
        trainer = Mine(
            **{**QUIET, "enable_progress_bar": enabled, "enable_checkpointing": True}, callbacks=[]
        )
        found = {type(one).__name__ for one in trainer.callbacks}
        assert found == {*names, "ModelCheckpoint"}
    assert trainer._callback_connector._attach_model_logging_functions() is None
