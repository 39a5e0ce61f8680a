"""Callbacks log as their module does, and a checkpoint keeps their states."""

from __future__ import annotations

import contextvars
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from callback_runs import Net, loader, trainer
from fixtures import run_file
from torch import nn

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.discovery import CallbackSpec, get_registry
from stratagem.errors import ConfigurationError, UnknownNameError, UserCodeError


class Counts(Callback):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}


def test_a_checkpoint_with_states_of_callbacks_that_are_not_there_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    saver = ModelCheckpoint(tmp_path)
    Trainer(max_epochs=1, callbacks=[saver, Counts()], **options).fit(Net(), loader())
    without = Trainer(max_epochs=2, enable_checkpointing=False, **options)
    with pytest.warns(UserWarning, match="holds the states of callbacks") as warned:
        without.fit(Net(), loader(), ckpt_path=saver.best_model_path)
    assert [str(one.message) for one in warned] == [
        f"{saver.best_model_path!r} holds the states of callbacks that this Trainer does not have: "
        "Counts; they are not restored. Pass those callbacks, with the same arguments, to go on "
        "with them"
    ]


@pytest.mark.parametrize("of_the_module", [False, True])
def test_a_checkpoint_has_the_states_after_its_event_whatever_the_order(
    of_the_module: bool, tmp_path: Path
) -> None:
    class Counting(Callback):
        count = 0

        def on_validation_end(self, trainer: Trainer, module: Module) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

    class Counted(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", 1.0)

        def configure_callbacks(self) -> list[Callback]:
            return [Counting()] if of_the_module else []

    saver = ModelCheckpoint(tmp_path, monitor="value")
    added = [] if of_the_module else [Counting()]
    run = trainer(saver, *added, max_epochs=1, num_sanity_val_steps=0)
    run.fit(Counted(), loader(), loader())
    assert run.callbacks[-1] is saver
    saved = SingleFileCheckpointIO().load_checkpoint(saver.best_model_path)
    assert {"count": 1} in saved["callbacks"].values()


def test_a_callback_logs_as_its_module_does() -> None:
    class Logs(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("one", 1.0, on_step=False, on_epoch=True)

        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            self.log_dict({"two": 2.0, "three": 3.0}, logger=False)

    class AModule(nn.Module, Logs):
        """A callback may be a module."""

        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            self.log("four", 4.0)

    run = trainer(Logs(), AModule(), max_epochs=1)
    run.fit(Net(), loader())
    values = {name: float(run.callback_metrics[name]) for name in ("one", "two", "four")}
    assert values == {"one": 1.0, "two": 2.0, "four": 4.0}
    with pytest.raises(UserCodeError, match=r"Logs.log\('late', ...\) works in a callback's hooks"):
        Logs().log("late", 1.0)


def test_a_callback_of_a_plugin_is_chosen_by_its_name() -> None:
    registry = get_registry()
    registry.add(CallbackSpec(name="counts", target=Counts, api_version=1))
    options: dict[str, Any] = {"logger": False, "accelerator": "cpu"}
    try:
        choices: tuple[Any, ...] = ("counts", ["counts"], ["COUNTS", ModelCheckpoint()])
        for given in choices:
            made = Trainer(callbacks=given, **options).callbacks
            assert sum(type(callback) is Counts for callback in made) == 1
        with pytest.raises(UnknownNameError, match=r"callback 'count'\. Did you mean 'counts'"):
            Trainer(callbacks=["count"], **options)
    finally:
        registry.remove("callback", "counts")
    with pytest.raises(ConfigurationError, match=r"Counts'>; expected .* or names of installed"):
        Trainer(callbacks=[Counts], **options)  # type: ignore[list-item]


def test_a_task_that_outlives_a_run_keeps_no_model() -> None:
    class Starts(Callback):
        def on_train_start(self, trainer: Trainer, module: Module) -> None:
            contexts.append(contextvars.copy_context())  # as a timer or a task of asyncio does

    contexts: list[contextvars.Context] = []
    one, net = trainer(Starts()), Net()
    one.fit(net, loader())
    kept = weakref.ref(net)
    del one, net
    gc.collect()
    assert kept() is None
    assert len(contexts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_decide_by_the_mean_of_their_values(strategy: str, tmp_path: Path) -> None:
    """The mean of both ranks does not change, which is no improvement."""
    script = Path(__file__).parents[1] / "scripts" / "monitored_values.py"
    run_file(script, strategy, folder=tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["val by epoch"] == first["train by epoch"] == [0.1 / 2**3, 4]
    assert first["val stops"] == first["train stops"] == [0.1 / 2**2, 3]
    for monitor in ("train", "val"):
        path = f"{strategy}-{monitor}/epoch=0-step=2.ckpt"
        assert first[f"{monitor} saves"] == [0.1 / 2**3, 4, path, 10.0]
