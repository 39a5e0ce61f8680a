"""Callbacks by Lightning's names: its bars, its reasons, its table, its names of checkpoints."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stratagem
from stratagem import Callback, Module, callbacks
from stratagem.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)
"""What is advised against here is what the tests are of, or does not matter to them."""


@pytest.fixture(scope="module")
def pl() -> Iterator[Any]:
    """`lightning.pytorch`, for the tests of this file."""
    before = set(sys.modules)
    path = list(sys.meta_path)
    import stratagem_lightning as served

    yield served.pytorch
    sys.meta_path[:] = path
    for name in set(sys.modules) - before:
        if "lightning" in name:
            del sys.modules[name]
    vars(stratagem).pop("lightning", None)


class Net(Module):
    def __init__(self, values: tuple[float, ...] = (0.1, 0.2)) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.values = values

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("a step")
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values[self.current_epoch], prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(6, 2), 2)  # type: ignore[arg-type]


def fit(pl: Any, tmp_path: Path, *used: Callback, net: Module | None = None, **options: Any) -> Any:
    options = {"max_epochs": 2, "logger": False, "enable_model_summary": False, **options}
    trainer = pl.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", devices=1, callbacks=list(used), **options
    )
    trainer.fit(net or Net(), loader(), loader())
    return trainer


def test_default_callbacks_are_of_the_classes_that_scripts_look_for(
    pl: Any, tmp_path: Path
) -> None:
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu")
    assert isinstance(trainer.checkpoint_callback, pl.callbacks.ModelCheckpoint)
    assert isinstance(trainer.progress_bar_callback, pl.callbacks.ProgressBar)
    bare = pl.Trainer(accelerator="cpu", barebones=True)
    assert bare.checkpoint_callback is bare.progress_bar_callback is None


def test_tqdms_bars_count_batches_and_can_be_overridden(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bar(pl.callbacks.TQDMProgressBar):  # type: ignore[misc]
        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.set_description("validating")
            return bar

        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, module), "own": 3}

    bar = Bar(refresh_rate=2)
    with pytest.raises(ConfigurationError, match=r"train_progress_bar: there is none before"):
        _ = bar.train_progress_bar
    with pytest.raises(ConfigurationError, match=r"trainer: there is none before a run begins"):
        _ = bar.trainer
    trainer = fit(pl, tmp_path, bar, num_sanity_val_steps=1)
    shown = capsys.readouterr().out
    assert "Epoch 1" in shown
    assert "validating" in shown
    assert "val_loss=0.200, own=3" in shown
    assert shown.count("a step") == 6
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (3, 3)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (3, 3)
    assert bar.trainer is trainer
    assert bar.total_val_batches == 3
    assert pickle.loads(pickle.dumps(callbacks.ProgressBar())).is_enabled
    bar.disable()
    trainer.validate(Net((0.1,) * 3), loader(), verbose=False)
    assert "Validation" not in capsys.readouterr().out


def test_a_bar_of_ones_own_shows_nothing_else(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Percent(pl.callbacks.ProgressBar):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            super().on_train_batch_end(trainer, module, *rest)
            seen.append((rest[-1] + 1) / self.total_train_batches)

    seen: list[float] = []
    fit(pl, tmp_path, Percent(), max_epochs=1)
    assert seen == [1 / 3, 2 / 3, 1.0]
    printed = capsys.readouterr()
    assert "epoch" not in printed.out + printed.err


def test_a_quick_run_keeps_its_callbacks_and_needs_no_monitored_value(pl: Any) -> None:
    saver = pl.callbacks.ModelCheckpoint(monitor="never")
    stop = pl.callbacks.EarlyStopping("never")
    trainer = pl.Trainer(accelerator="cpu", fast_dev_run=True, callbacks=[saver, stop])
    trainer.fit(Net(), DataLoader(torch.ones(4, 2), 2))  # type: ignore[arg-type]
    assert trainer.checkpoint_callback is saver
    assert trainer.early_stopping_callback is stop
    assert (saver.best_model_path, saver.dirpath) == ("", None)


def test_the_last_checkpoint_is_saved_where_no_save_came_due(pl: Any, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=10)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=saver, logger=False)
    trainer.fit(Net(), DataLoader(torch.ones(4, 2), 2))  # type: ignore[arg-type]
    assert saver.last_model_path == str(tmp_path / "last.ckpt")
    assert torch.load(saver.last_model_path)["global_step"] == 4


def test_a_bar_ends_where_max_steps_end_the_epoch(pl: Any, tmp_path: Path) -> None:
    by_hand = Net()
    by_hand.automatic_optimization = False  # nobody knows how many steps a batch has
    for net, batches, options, shown in (
        (by_hand, loader(), {"max_steps": 1, "max_epochs": 1}, (3, 3)),
        (Net(), loader(), {"max_steps": 4}, (1, 1)),  # of the second epoch's three batches
        (Net(), (batch for batch in loader()), {"max_steps": 2, "max_epochs": -1}, (2, 2)),
        (Net(), (batch for batch in loader()), {"max_epochs": 1}, (None, 3)),
    ):
        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            logger=False,
            limit_val_batches=0,
            enable_checkpointing=False,
            **options,
        )
        trainer.fit(net, batches)
        bar = trainer.progress_bar_callback.train_progress_bar
        assert (bar.total, bar.completed) == shown


def test_a_theme_formats_the_values_that_are_shown(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem_lightning.api.callbacks.rich_bar import RichProgressBarTheme

    theme = RichProgressBarTheme(metrics_format=".1e")
    fit(pl, tmp_path, pl.callbacks.RichProgressBar(theme=theme), logger=True)
    shown = capsys.readouterr().err
    assert "val_loss 2.0e-01" in shown


def test_a_subclass_of_early_stopping_may_decide_itself(pl: Any, tmp_path: Path) -> None:
    class Patient(pl.callbacks.EarlyStopping):  # type: ignore[misc]
        asked = 0

        def _evaluate_stopping_criteria(self, current: Any) -> tuple[bool, str | None]:
            self.asked += 1
            if self.asked <= 2:
                return False, None
            assert current.shape == ()
            return True, f"asked {self.asked} times"

    stopper = Patient("val_loss")
    fit(pl, tmp_path, stopper, net=Net((0.1, 0.1, 0.1, 0.1)), max_epochs=4)
    assert stopper.stopped_epoch == 2
    assert stopper.stopping_reason_message == "EarlyStopping: asked 3 times"


def test_a_subclass_of_early_stopping_may_skip_its_check(pl: Any, tmp_path: Path) -> None:
    class Warm(pl.callbacks.EarlyStopping):  # type: ignore[misc]
        def _run_early_stopping_check(self, trainer: Any) -> None:
            if trainer.current_epoch >= 3:
                super()._run_early_stopping_check(trainer)

    stopper = Warm("val_loss", patience=1)
    fit(pl, tmp_path, stopper, net=Net((0.1,) * 8), max_epochs=8)
    assert stopper.stopped_epoch == 4


def test_model_checkpoint_subclass_chooses_the_time_of_saves(pl: Any, tmp_path: Path) -> None:
    class Mine(pl.callbacks.ModelCheckpoint):  # type: ignore[misc]
        after_training: bool = False
        skipped = 0

        def _should_save_on_train_epoch_end(self, trainer: Any) -> bool:
            assert self._save_on_train_epoch_end is None
            return self.after_training

        def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
            self.skipped += trainer.current_epoch == 0
            return bool(
                trainer.current_epoch == 0 or self._last_global_step_saved == trainer.global_step
            )

    saver = Mine(tmp_path / "a", save_top_k=-1)
    trainer = fit(pl, tmp_path, saver, net=Net((0.1, 0.2, 0.3, 0.4)), max_epochs=3)
    assert saver.skipped == 1
    assert len(saver.kept_paths) == 2
    saver = Mine(tmp_path / "b")
    trainer.callbacks = [saver]
    trainer.validate(trainer.lightning_module, loader(), verbose=False)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["epoch=3-step=9.ckpt"]


def test_early_stopping_says_its_reason(pl: Any, tmp_path: Path) -> None:
    reasons = pl.callbacks.early_stopping.EarlyStoppingReason
    stopper = pl.callbacks.EarlyStopping("val_loss", patience=1)
    assert stopper.stopping_reason == reasons.NOT_STOPPED
    fit(pl, tmp_path, stopper, net=Net((0.1, 0.2, 0.3)), max_epochs=3)
    assert stopper.stopping_reason == reasons.PATIENCE_EXHAUSTED
    again = pl.callbacks.EarlyStopping("val_loss")
    again.load_state_dict(stopper.state_dict())
    assert again.stopping_reason == reasons.PATIENCE_EXHAUSTED
    assert again.stopping_reason_message == stopper.stopping_reason_message
    stopper.stopping_reason = reasons.NOT_STOPPED
    assert stopper.stopped_by == ""


def test_checkpoints_are_named_and_listed_as_lightnings(pl: Any, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(
        tmp_path / "a",
        "{epoch}_{val_loss:.1f}",
        "val_loss",
        True,
        save_top_k=2,
        auto_insert_metric_name=False,
    )
    fit(pl, tmp_path, saver)
    assert saver.dirpath == str(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["0_0.1.ckpt", "1_0.2.ckpt"]
    assert Path(saver.kth_best_model_path).name == "1_0.2.ckpt"
    taken = inspect.signature(pl.callbacks.ModelCheckpoint).parameters
    assert taken["save_last"].annotation == bool | Literal["link"] | None
    assert saver.current_score.item() == pytest.approx(0.2)
    assert saver.best_model_score.item() == pytest.approx(0.1)
    assert saver.kth_value.item() == pytest.approx(0.2)
    saver.to_yaml()
    listed = json.loads((tmp_path / "a" / "best_k_models.yaml").read_text())
    assert listed == saver.best_k_models
    assert saver.format_checkpoint_name({"epoch": 3}, ver=2, prefix="p") == str(
        tmp_path / "a" / "p-3_0.0-v2.ckpt"
    )
    newest = pl.callbacks.ModelCheckpoint(tmp_path / "b")
    fit(pl, tmp_path, newest)
    assert (newest.best_k_models, newest.best_model_score, newest.kth_value) == ({}, None, None)
    assert newest.kth_best_model_path == ""
    assert newest.best_model_path


def test_save_on_exception_uses_the_given_filename(pl: Any, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 1:
                raise RuntimeError("trouble")

    class FailsAtLast(Callback):
        def on_fit_end(self, *args: Any) -> None:
            raise RuntimeError("trouble")

    for folder, callback in ((tmp_path / "batch", Fails()), (tmp_path / "fit", FailsAtLast())):
        saver = pl.callbacks.ModelCheckpoint(
            folder, "mine", save_on_exception=True, every_n_epochs=7
        )
        with pytest.raises(RuntimeError, match="trouble"):
            fit(pl, tmp_path, saver, callback)
        assert (folder / "mine.ckpt").exists()


def test_the_table_of_a_model_has_lightnings_attributes(pl: Any) -> None:
    summary = pl.utilities.model_summary.ModelSummary(Net())
    assert summary.layer_names == ["layer"]
    assert summary.total_layer_params == summary.trainable_parameters == 3
    assert summary.total_training_modes == {"train": 1, "eval": 0}
    assert "layer" in str(summary)
    with pytest.raises(ConfigurationError, match="`max_depth` can be -1, 0 or > 0, got -2"):
        pl.utilities.model_summary.summarize(Net(), max_depth=-2)


def test_the_last_checkpoint_is_called_as_its_class_says(pl: Any, tmp_path: Path) -> None:
    class Named(pl.callbacks.ModelCheckpoint):  # type: ignore[misc]
        CHECKPOINT_NAME_LAST = "{epoch}-last"
        CHECKPOINT_EQUALS_CHAR = "_"

    saver = Named(tmp_path / "a", save_last=True)
    fit(pl, tmp_path, saver)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "epoch_1-last.ckpt",
        "epoch_1-step_6.ckpt",
    ]
    assert Path(saver.last_model_path).resolve() == Path(saver.best_model_path)
    saver.CHECKPOINT_JOIN_CHAR = "."
    assert saver.format_checkpoint_name({"epoch": 2}, "{epoch}", 3, "a") == (
        f"{saver.dirpath}/a.epoch_2.v3.ckpt"
    )
    saver.FILE_EXTENSION = ".pt"
    with pytest.raises(ConfigurationError, match=r"Named.FILE_EXTENSION is '.pt': expec"):
        fit(pl, tmp_path, saver)


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_base_prediction_writer_receives_batch_indices(pl: Any, interval: Any) -> None:
    told: list[Any] = []

    class Writes(pl.callbacks.BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, *arguments: Any) -> None:
            told.append(arguments[3])

        def write_on_epoch_end(self, *arguments: Any) -> None:
            told.extend(arguments[3][0])

    class Predicts(pl.LightningModule):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=Writes(interval)
    )
    trainer.predict(Predicts(), DataLoader(torch.arange(5.0), batch_size=2))  # type: ignore[arg-type]
    assert told == [[0, 1], [2, 3], [4]]


def test_the_steps_of_a_fit_are_estimated_without_the_schedule_of_accumulation(pl: Any) -> None:
    steps: list[float] = []

    class Estimates(Net):
        def configure_optimizers(self) -> Any:
            steps.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    def fit(**options: Any) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        options = {"max_epochs": 3, **quiet, **options}
        trainer = pl.Trainer(accelerator="cpu", limit_val_batches=0, **options)
        trainer.fit(Estimates(), DataLoader(torch.ones(4, 2)))  # type: ignore[arg-type]

    schedule = pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})
    fit(callbacks=schedule)
    fit(callbacks=schedule, max_steps=5)
    fit(accumulate_grad_batches=2)
    assert steps == [12, 5, 6]


def test_scripts_set_the_best_path_and_the_datamodule(pl: Any, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=saver, max_steps=2
    )
    datamodule = pl.LightningDataModule()
    trainer.datamodule = datamodule
    assert trainer.datamodule is datamodule
    saver.best_model_path = "another.ckpt"
    assert saver.best_model_path == "another.ckpt"
    trainer.fit(Net(), loader())
    assert Path(saver.best_model_path).exists()
