"""What user code overrides, and Lightning alone calls, is refused by name when a run begins."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import UserCodeError
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.core.datamodule import LightningDataModule
from stratagem_lightning.api.core.loops import EvaluationLoop
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.overrides import is_called
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.trainer import Trainer

NAMES = ("callbacks", "loggers", "profilers", "strategies")
HOMES: list[Any] = [importlib.import_module(f"stratagem_lightning.pytorch.{n}") for n in NAMES]
callbacks, loggers, _, strategies = HOMES

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def override(base: type, *names: str) -> Any:
    return type("Mine", (base,), dict.fromkeys(names, lambda self, *arguments: None))()


@pytest.mark.parametrize(
    ("base", "name", "options"),
    [
        (callbacks.ModelCheckpoint, "_should_remove_checkpoint", lambda one: {"callbacks": one}),
        (callbacks.ModelCheckpoint, "check_monitor_top_k", lambda one: {"callbacks": [one]}),
        (callbacks.EarlyStopping, "_should_skip_check", lambda one: {"callbacks": one}),
        (loggers.CSVLogger, "group_separator", lambda one: {"logger": one}),
        (strategies.DDPStrategy, "_setup_model", lambda one: {"strategy": one}),
    ],
)
def test_an_override_that_is_never_called_is_refused(
    base: type, name: str, options: Callable[[Any], dict[str, Any]]
) -> None:
    arguments = {"monitor": "loss"} if base is callbacks.EarlyStopping else {}
    if base is loggers.CSVLogger:
        arguments = {"save_dir": "logs"}
    kind = type("Mine", (base,), {name: lambda self, *arguments: None})
    saves = {"enable_checkpointing": base is callbacks.ModelCheckpoint}
    trainer = Trainer(**{**QUIET, **saves, **options(kind(**arguments))})
    with pytest.raises(UserCodeError) as raised:
        trainer.fit(BoringModel())
    assert str(raised.value) == (
        f"Mine overrides {name} of {base.__name__}, which Lightning calls and Stratagem does not: "
        "the run would differ silently. Move the code into a hook (such as on_validation_end) or "
        "a method that both have"
    )


def test_overridden_progress_bar_internals_are_refused_with_a_remedy() -> None:
    bar = override(callbacks.RichProgressBar, "_init_progress")
    with pytest.raises(UserCodeError) as raised:
        Trainer(**{**QUIET, "callbacks": bar, "enable_progress_bar": True}).fit(BoringModel())
    assert str(raised.value) == (
        "Mine overrides _init_progress of RichProgressBar, which Lightning calls and Stratagem "
        "does not: the run would differ silently. Override get_metrics to choose the values, or "
        "pass theme=RichProgressBarTheme(...) for their format; for a bar of another form, "
        "subclass "
        "TQDMProgressBar, whose init_train_tqdm and its like are called, or ProgressBar, and draw "
        "it in on_train_batch_end"
    )


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_models_and_datamodules_are_looked_at_in_each_stage(stage: str) -> None:
    run = getattr(Trainer(**QUIET), stage)
    with pytest.raises(UserCodeError, match="Mine overrides _call_batch_hook of LightningModule"):
        run(override(BoringModel, "_call_batch_hook"))
    datamodule = override(LightningDataModule, "remove_ignored_hparams", "_to_hparams_dict")
    text = "Mine overrides _to_hparams_dict, remove_ignored_hparams of LightningDataModule"
    with pytest.raises(UserCodeError, match=text):
        run(BoringModel(), datamodule=datamodule)


def test_a_trainer_that_overrides_its_own_stages_is_refused() -> None:
    class Mine(Trainer):
        def _run_stage(self) -> None:
            pass

    with pytest.raises(UserCodeError, match="Mine overrides _run_stage of Trainer"):
        Mine(**QUIET).fit(BoringModel())


def test_hooks_and_methods_of_their_own_are_not() -> None:
    seen = []

    class Saver(ModelCheckpoint):
        def _own(self) -> None:
            seen.append("own")

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            self._own()

    class Fine(BoringModel):
        def check_monitor_top_k(self) -> None:  # means nothing in a model
            pass

    trainer = Trainer(**{**QUIET, "callbacks": Saver(), "enable_checkpointing": True})
    trainer.fit(Fine(), [torch.ones(1, 32)] * 2)
    assert seen == ["own"]


def test_table_of_uncalled_methods_lists_uncalled_methods_only() -> None:
    text = files("stratagem_lightning.api.core").joinpath("uncalled.txt").read_text()
    classes = {"Trainer": Trainer, "LightningModule": LightningModule}
    found = 0
    for line in text.splitlines():
        name, _, methods = line.partition(": ")
        kind = classes.get(name) or next((getattr(h, name) for h in HOMES if name in dir(h)), None)
        if kind is not None:
            found += 1
            assert [each for each in methods.split() if is_called(kind, each)] == []
    assert found > 40


def test_methods_that_libraries_override_are_called(tmp_path: Path) -> None:
    class Saver(ModelCheckpoint):
        saved: tuple[float, ...] = ()

        def _update_best_and_save(
            self, current: torch.Tensor, trainer: Any, monitor_candidates: dict[str, Any]
        ) -> None:
            super()._update_best_and_save(current, trainer, monitor_candidates)
            assert current == self.best_model_score == monitor_candidates["val"]
            assert monitor_candidates["step"] == trainer.global_step
            self.saved += (float(current),)

    class Monitor(callbacks.LearningRateMonitor):  # type: ignore[misc, name-defined]
        def _get_optimizer_stats(self, *arguments: Any) -> dict[str, float]:
            stats: dict[str, float] = super()._get_optimizer_stats(*arguments)
            return {name: 2 * value for name, value in stats.items()}

    class Model(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0 / (1 + self.current_epoch))

    saver, monitor = Saver(tmp_path, monitor="val"), Monitor()
    options = {**QUIET, "enable_checkpointing": True, "max_steps": -1, "logger": True}
    trainer = Trainer(
        **options,
        max_epochs=2,
        limit_train_batches=1,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        callbacks=[saver, monitor],
    )
    trainer.fit(Model())
    assert saver.saved == (1.0, 0.5)
    assert monitor.lrs["lr-SGD"][0] == 0.2


def test_a_loop_that_prints_in_its_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(EvaluationLoop):
        @staticmethod
        def _print_results(results: list[dict[str, torch.Tensor]], stage: str) -> None:
            print(stage, results[0]["value"].item())

    class Model(BoringModel):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", 3.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", 4.0)

    trainer = Trainer(**QUIET)
    trainer.test_loop = Printing(trainer, "test", "test", inference_mode=True)
    trainer.validate_loop = Printing(trainer)
    trainer.test(Model(), verbose=False)
    assert capsys.readouterr().out == ""
    trainer.test(Model())
    trainer.validate(Model())
    assert capsys.readouterr().out == "test 3.0\nvalidate 4.0\n"
    trainer.test_loop = EvaluationLoop(trainer)
    trainer.test(Model())
    assert capsys.readouterr().out == "test value: 3\n"

    trainer.test_loop = type("Mine", (Printing,), {"run": lambda self: []})(trainer)
    with pytest.raises(UserCodeError, match="Mine overrides run of EvaluationLoop"):
        trainer.test(Model())


def test_a_writer_of_a_csv_loggers_own_gets_rows_and_hyperparameters(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.parameters: dict[str, Any] = {}
            self.saves = 0

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.steps.append(step)

        def log_hparams(self, params: dict[str, Any]) -> None:
            self.parameters.update(params)

        def save(self) -> None:
            self.saves += 1

    writer = Writer()

    class Mine(loggers.CSVLogger):  # type: ignore[misc, name-defined]
        @property
        def experiment(self) -> Writer:
            return writer

    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 0.5)
            return super().training_step(batch, batch_idx)

    logger = Mine(tmp_path)
    logger.log_hyperparams({"width": 3})
    Trainer(**{**QUIET, "max_steps": 4, "logger": logger, "log_every_n_steps": 2}).fit(Logs())
    assert writer.steps == [1, 3]
    assert writer.parameters == {"width": 3}
    assert writer.saves >= 1
    assert not Path(logger.log_dir, "metrics.csv").exists()


STEP_OF = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
HOOKS_OF = {"validate": "on_validation", "test": "on_test", "predict": "on_predict"}


def model_with(name: str, method: Callable[..., Any], loaders: int) -> LightningModule:
    def step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    own = {f"{one}_dataloader": lambda self: _data(loaders) for one in ("val", "test", "predict")}
    model: LightningModule = type(
        "Mine", (BoringModel,), {**dict.fromkeys(STEP_OF.values(), step), name: method, **own}
    )()
    return model


def _data(loaders: int) -> Any:
    return [BoringModel().val_dataloader() for _ in range(loaders)]


def run_stage(stage: str, model: LightningModule) -> None:
    options = {**QUIET, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    getattr(Trainer(**options), stage)(model)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_several_loaders_need_the_argument_that_tells_them_apart(stage: str) -> None:
    start, end = (f"{HOOKS_OF[stage]}_batch_{at}" for at in ("start", "end"))
    for name, lacks, has in (
        (STEP_OF[stage], lambda s, batch, batch_idx: None, lambda s, b, i, dataloader_idx: None),
        (start, lambda s, batch, batch_idx: None, lambda s, batch, *rest: None),
        (end, lambda s, outputs, batch, i: None, lambda s, o, b, i, dataloader_idx=0: None),
    ):
        said = rf"no `dataloader_idx` argument in `Mine.{name}\(\)`"
        with pytest.raises(RuntimeError, match=said):
            run_stage(stage, model_with(name, lacks, 2))
        run_stage(stage, model_with(name, has, 2))


def test_a_predict_step_that_is_none_is_refused() -> None:
    model = BoringModel()
    vars(model)["predict_step"] = None
    with pytest.raises(UserCodeError, match="`predict_step` cannot be None to run"):
        Trainer(**QUIET).predict(model)


def test_a_single_loader_passes_no_index() -> None:
    def needs(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
    def needs_other(self: Any, batch: Any, batch_idx: int, dl_idx: int) -> None: ...
    def has_default(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    with pytest.raises(RuntimeError, match="only a single `val_dataloader`, but have included"):
        run_stage("validate", model_with("validation_step", needs, 1))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dl_idx'"):
        run_stage("validate", model_with("validation_step", needs_other, 1))
    run_stage("validate", model_with("validation_step", has_default, 1))
