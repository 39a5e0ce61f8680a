"""Private names of Lightning's that other projects import work, or say what to write."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from stratagem import Callback
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_lightning.absent import explain
from stratagem_lightning.api.callbacks.early_stopping import EarlyStopping
from stratagem_lightning.api.core import calls
from stratagem_lightning.api.core.datamodule import LightningDataModule
from stratagem_lightning.api.core.loops import EpochLoop, FitLoop, PredictionLoop
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.strategies.launchers import ProcessesLauncher, ScriptLauncher
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities.device_parser import parse_gpu_ids

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Noting(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_own(self, trainer: Any, module: Any, *args: Any, **options: Any) -> None:
        self.seen.append((module, args, options))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class Own(Noting):
    """What a model configures."""


class Model(BoringModel):
    def configure_callbacks(self) -> Any:
        return Own()

    def doubled(self, number: int, *, more: int = 0) -> int:
        return 2 * number + more


def test_hooks_are_called_by_their_names() -> None:
    noting, model = Noting(), Model()
    trainer = Trainer(**QUIET, callbacks=noting)
    calls.call_callback_hooks(trainer, "on_own", 1, key=2)
    trainer.fit(model)
    trainer.callbacks = [noting]
    calls.call_callback_hooks(trainer, "on_own", 3)
    assert noting.seen == [(None, (1,), {"key": 2}), (model, (3,), {})]
    assert calls.call_lightning_module_hook(trainer, "doubled", 3, more=1) == 7
    assert calls.call_lightning_module_hook(trainer, "doubled", 3, pl_module=Model()) == 6
    assert calls.call_lightning_module_hook(trainer, "no_such_hook") is None
    assert calls.call_callbacks_state_dict(trainer) == {noting.state_key: {"seen": 1}}
    assert calls.call_and_handle_interrupt(trainer, lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(UserCodeError) as raised:
        calls.call_lightning_datamodule_hook(trainer, "setup", "fit")
    assert str(raised.value) == (
        "No `LightningDataModule` is available to call 'setup' on: expected a call within fit, "
        "validate, test or predict that was given one"
    )
    trainer.datamodule = type("Data", (LightningDataModule,), {"size": lambda self: 5})()
    assert calls.call_lightning_datamodule_hook(trainer, "size") == 5


@pytest.mark.parametrize(("monitoring", "count"), [(None, 2), (True, 1), (False, 1)])
def test_hooks_of_monitoring_callbacks_can_be_called_alone(
    monitoring: bool | None, count: int
) -> None:
    seen: list[str] = []

    class Stop(EarlyStopping):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            seen.append("stop")

    class Other(Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            seen.append("other")

    trainer = Trainer(**QUIET, callbacks=[Stop("loss"), Other()])
    calls.call_callback_hooks(trainer, "on_fit_end", monitoring_callbacks=monitoring)
    assert len(seen) == count
    assert seen[0] == ("other" if monitoring is False else "stop")


def test_callbacks_of_a_model_are_attached_once() -> None:
    class Attaching(Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            trainer._callback_connector._attach_model_callbacks()

    trainer = Trainer(**QUIET, callbacks=[Attaching(), Own()])
    trainer.fit(Model())
    assert [type(one).__name__ for one in trainer.callbacks] == ["Attaching", "Own"]


def test_a_strategy_has_its_model_under_the_private_name() -> None:
    model = BoringModel()
    trainer: Any = Trainer(**QUIET)
    trainer.fit(model)
    assert trainer.strategy._lightning_module is model


def test_a_checkpoint_is_resumed_from_by_an_argument_alone() -> None:
    trainer: Any = Trainer(**QUIET)
    use = "use trainer.save_checkpoint() and the argument ckpt_path"
    place = "trainer._checkpoint_connector"
    with pytest.raises(AttributeError) as raised:
        trainer._checkpoint_connector.restore("last.ckpt")
    assert str(raised.value) == (
        f"{place} has no 'restore' in Stratagem; expected one of dump_checkpoint; {use}"
    )
    with pytest.raises(AttributeError) as raised:
        trainer._checkpoint_connector.resume_from_checkpoint_fit_path = "last.ckpt"
    assert str(raised.value) == (
        f"{place}.resume_from_checkpoint_fit_path cannot be set in Stratagem; {use}"
    )


def test_loops_are_views_and_cannot_be_replaced() -> None:
    trainer: Any = Trainer(**QUIET)
    assert isinstance(trainer.fit_loop, FitLoop)
    assert isinstance(trainer.fit_loop.epoch_loop, EpochLoop)
    assert isinstance(trainer.predict_loop, PredictionLoop)
    trainer.fit_loop = trainer.fit_loop  # what gives a loop back is no loop of its own
    for base in (FitLoop, EpochLoop):
        kind = type("Mine", (base,), {"__module__": "mine"})
        with pytest.raises(ConfigurationError) as raised:
            kind(trainer)
        assert str(raised.value) == (
            "Mine is a loop of its own, and a Trainer has no loops that could be replaced: write "
            "the loop with Fabric, override training_step(self, dataloader_iter) to read batches, "
            "or use a callback's hooks between steps"
        )
    with pytest.raises(ConfigurationError, match="Own is a loop of its own"):
        trainer.fit_loop = type("Own", (), {"__module__": "mine"})()


def test_the_kind_of_a_launcher_is_known() -> None:
    for strategy, kind in (("ddp", ScriptLauncher), ("ddp_spawn", ProcessesLauncher)):
        trainer: Any = Trainer(**{**QUIET, "devices": 2}, strategy=strategy)
        assert isinstance(trainer.strategy.launcher, kind)
    assert not isinstance(trainer.strategy.launcher, ScriptLauncher)
    with pytest.raises(ConfigurationError) as raised:
        ScriptLauncher(None, 2, 1)
    assert str(raised.value) == (
        "ScriptLauncher is a private class of Lightning's: pass launcher='script', 'spawn' or "
        "'fork' to the strategy, or a stratagem.launch.Launcher of your own as "
        "Trainer(plugins=...)"
    )


def test_gpus_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for gpus, expected in (
        (2, [0, 1]),
        ("2", [0, 1]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ([1, 3], [1, 3]),
        ("1, 3", [1, 3]),
        ("2,", [2]),
        ([], None),
        (None, None),
    ):
        assert parse_gpu_ids(gpus, include_cuda=True) == expected
    for wrong in (5, [0, 0], [4], "-2,"):
        with pytest.raises(ConfigurationError, match=r"and this machine has \[0, 1, 2, 3\]: exp"):
            parse_gpu_ids(wrong, include_cuda=True)
    for text in ("", "all", "0,x"):
        with pytest.raises(ConfigurationError, match="expected a number of GPUs, -1, or indices s"):
            parse_gpu_ids(text)
    with pytest.raises(ConfigurationError) as raised:
        parse_gpu_ids(1)
    assert str(raised.value) == (
        "You requested gpus=1, and this machine has none: expected each of these at most once; "
        "accelerator='auto', devices='auto' takes what is there"
    )
    with pytest.raises(TypeError, match="gpus=True: expected a number of GPUs, -1, a list"):
        parse_gpu_ids(True)


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("pytorch.trainer.call", "_call_strategy_hook", "the method itself"),
        ("pytorch.strategies.launchers", "_XLALauncher", "launcher='script', 'spawn' or 'fork'"),
        ("fabric.utilities.device_parser", "_parse_tpu_devices", "the arguments accelerator"),
        ("pytorch.loops", "_Loop", "Trainer's attributes, and stratagem.Lite"),
        ("pytorch.trainer.connectors", "_Connector", "Trainer's attributes and its arguments"),
    ],
)
def test_missing_private_name_raises_with_advice(module: str, name: str, use: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(importlib.import_module(f"stratagem_lightning.{module}"), name)
    assert str(raised.value) == explain(f"stratagem_lightning.{module}", name)
    assert f"Stratagem has no 'lightning.{module}.{name}'; use {use}" in str(raised.value)


def test_a_fetcher_of_batches_names_the_step_that_reads_them() -> None:
    fetchers: Any = importlib.import_module("stratagem_lightning.pytorch.loops.fetchers")
    with pytest.raises(ConfigurationError) as raised:
        fetchers._PrefetchDataFetcher()
    assert str(raised.value) == (
        "Stratagem has no DataFetcher; use a step that reads its batches itself: "
        "training_step(self, dataloader_iter)"
    )
