"""What a run says of itself: in a terminal, in the lines of a log, in a notebook."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from shown_runs import Logs, numbers, trainer_with
from torch import Tensor, nn

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, Row, Timer
from stratagem.callbacks.progress.display import Lines

HAS_EXTRAS = find_spec("stratagem_extras") is not None
"""Whether a command draws logs, so that the end of a fit names it."""


def test_a_run_of_which_nothing_is_to_be_seen_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Logs(lambda m, batch, i: m.log("loss", batch.mean(), prog_bar=True))
    trainer_with(enable_progress_bar=False).fit(model, numbers())
    assert capsys.readouterr() == ("", "")


def said(capsys: pytest.CaptureFixture[str], **arguments: Any) -> list[str]:
    """What a fit says on stderr, where stdout is no terminal and has nothing."""
    model = arguments.pop("model", None) or Logs(
        lambda m, batch, i: m.log("loss", batch.mean(), prog_bar=True, on_epoch=True)
    )
    trainer_with(**arguments).fit(model, numbers(), numbers())
    out, err = capsys.readouterr()
    assert out == ""
    return [re.sub(r"\d+:\d\d|[\d.]+ it/s", "_", line) for line in err.splitlines()]


def test_progress_bar_without_a_terminal_prints_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = said(capsys, max_epochs=2, default_root_dir=tmp_path, logger=True)
    folder = tmp_path / "stratagem_logs" / "version_0"
    assert lines == [
        "stratagem: fit on cpu: strategy single_device, one process, precision 32-true",
        "stratagem: Logs has 1 parameters",
        f"stratagem: logs go to {folder}",
        "stratagem: there is a loader for validation, but Logs has no validation_step, so there is "
        "no validation",
        "epoch 0/1  3/3  _  elapsed _  loss_step 8.5  loss_epoch 4.5",
        "epoch 1/1  3/3  _  elapsed _  loss_step 8.5  loss_epoch 4.5",
        "stratagem: training ended after 2 epochs, 6 steps: max_epochs=2",
        *([f"stratagem: to see its logs: stratagem report '{folder}'"] * HAS_EXTRAS),
    ]


def test_parameter_line_counts_trained_ones_and_yields_to_a_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Logs()
    model.frozen = nn.Parameter(torch.zeros(1999), requires_grad=False)
    assert "stratagem: Logs has 2.0 K parameters, 1 of them trained" in said(capsys, model=model)
    lines = said(capsys, enable_model_summary=True)
    assert not any(line.endswith(" parameters") for line in lines)


def test_lines_of_a_log_come_every_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(line_seconds=0.0)
    lines = said(capsys, callbacks=bar)
    assert [line.split("  ")[1] for line in lines if line.startswith("epoch")] == [
        "1/3",
        "2/3",
        "3/3",
        "3/3",
    ]


def test_a_log_has_a_line_for_every_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = [line for line in said(capsys, max_epochs=50) if line.startswith("epoch")]
    assert [line.partition("  ")[0] for line in epochs] == [f"epoch {n}/49" for n in range(50)]


def test_the_line_of_an_epoch_has_the_values_of_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            self.log("ended", float(trainer.current_epoch), prog_bar=True)

    lines = said(capsys, callbacks=Ends(), max_epochs=2)
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [re.findall(r"^epoch \d|ended \d", line) for line in epochs] == [
        ["epoch 0", "ended 0"],
        ["epoch 1", "ended 1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_steps": 2}, "0 epochs, 2 steps: max_steps=2"),
        ({"max_time": 1e-9}, "0 epochs, 1 step: max_time=1e-09 seconds"),
        ({"limit_train_batches": 0}, "0 epochs, 0 steps: there is no batch to train on"),
        (
            {"callbacks": EarlyStopping("loss_epoch", patience=1), "max_epochs": 9},
            "2 epochs, 6 steps: EarlyStopping: loss_epoch did not improve on 4.5 (patience=1)",
        ),
    ],
)
def test_progress_bar_prints_the_reason_for_the_end(
    arguments: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, **arguments)[-1] == f"stratagem: training ended after {reason}"


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_timer_without_a_limit_of_the_trainer_is_the_reason(
    interval: Literal["step", "epoch"], capsys: pytest.CaptureFixture[str]
) -> None:
    timer = Timer(duration=1e-9, interval=interval)
    last = said(capsys, callbacks=timer, max_epochs=-1)[-1]
    assert last.partition(": ")[2].partition(": ")[2] == (
        f"Timer(duration=1e-09 s) is up: {timer.time_elapsed():.1f} s"
    )


def test_progress_bar_names_should_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(m: Logs, batch: Tensor, i: int) -> None:
        m.trainer.should_stop = True

    lines = said(capsys, model=Logs(stop))
    assert lines[-1].endswith("0 epochs, 1 step: Trainer.should_stop was set")
    lines = said(capsys, model=Logs(stop), min_steps=2)
    assert lines[-1].endswith("2 steps: Trainer.should_stop was set before the minimum of training")


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 3}, {"max_steps": 2}])
def test_progress_bar_names_the_limit_of_a_resumed_run(
    limit: dict[str, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path)
    said(capsys, callbacks=saver, enable_checkpointing=True)
    again = trainer_with(**{"max_epochs": -1, **limit})
    again.fit(Logs(), numbers(), ckpt_path=saver.best_model_path)
    name, number = next(iter(limit.items()))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"stratagem: training ended after 1 epoch, 3 steps: {name}={number} was reached before the "
        f"first step; pass a larger {name} to train further"
    )


def test_progress_bar_names_the_resumed_and_the_best_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="loss_epoch")
    said(capsys, callbacks=saver, enable_checkpointing=True)
    model = Logs(lambda m, batch, i: m.log("loss", batch.mean(), on_epoch=True))
    goes_on = trainer_with(max_epochs=2)
    goes_on.fit(model, numbers(), ckpt_path=saver.best_model_path)
    path = tmp_path / "epoch=0-step=3.ckpt"
    assert f"resumed from {path}, at epoch 1, step 3\n" in capsys.readouterr().err
    saver = ModelCheckpoint(tmp_path / "again", monitor="loss_epoch")
    lines = said(capsys, callbacks=saver, enable_checkpointing=True)
    assert f"stratagem: checkpoints go to {tmp_path / 'again'}" in lines
    assert lines[-1] == f"stratagem: best checkpoint (loss_epoch 4.5): {saver.best_model_path}"


def test_folders_below_the_working_folder_have_one_form_in_all_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("saved", tmp_path / "saved"):
        saver = ModelCheckpoint(given)
        lines = said(
            capsys, callbacks=saver, enable_checkpointing=True, logger=True, default_root_dir="."
        )
        assert "stratagem: checkpoints go to saved" in lines
        assert any(line.startswith("stratagem: logs go to stratagem_logs/") for line in lines)
        assert "stratagem: newest checkpoint: saved/epoch=0-step=3.ckpt" in lines
        capsys.readouterr()
        trainer_with(max_epochs=1).fit(Logs(), numbers(), ckpt_path=saver.best_model_path)
        assert "resumed from saved/epoch=0-step=3.ckpt, at" in capsys.readouterr().err
        shutil.rmtree("saved")


def test_in_a_notebook_one_line_is_written_again_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.callbacks.progress.display.is_interactive", lambda: True)
    steps = iter(range(100))
    monkeypatch.setattr("stratagem.callbacks.progress.bar.monotonic", lambda: float(next(steps)))
    model = Logs(validate=lambda m, batch, i: None)
    trainer_with(num_sanity_val_steps=0).fit(model, numbers(), numbers())
    out, err = capsys.readouterr()
    assert err == ""
    first, second, *_ = out.split("\r")
    assert first.splitlines()[-1].startswith("epoch 0/0  1/3")
    assert second.startswith("epoch 0/0  2/3")
    assert "\rvalidation  1/3" in out
    assert out.splitlines()[-2].startswith("epoch 0/0  3/3")


ON_A_TERMINAL = """
import torch
from torch import nn
from stratagem import Module, Trainer
from stratagem.callbacks import ProgressBar

class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        self.log("a_long_name_of_a_loss", 0.123456, prog_bar=True)
        return self.net(batch).sum()
    def test_step(self, batch, batch_idx):
        self.log("test_[bold]_ü", 0.5)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, callbacks=ProgressBar(refresh_seconds=0.0))
trainer.fit(Net(), torch.ones(3, 1, 1))
trainer.test(dataloaders=torch.ones(3, 1, 1))
"""


def test_a_terminal_without_extras_has_a_line_that_fits_its_width(tmp_path: Path) -> None:
    command, terminal = os.openpty()
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_TERMINAL.replace("refresh_seconds=0.0", "refresh_seconds=0.5")],
        env={
            **os.environ,
            "STRATAGEM_DISABLE_PLUGINS": "stratagem-extras",
            "PYTHONIOENCODING": "ascii",
            "COLUMNS": "50",
        },
        stdout=terminal,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    os.close(terminal)
    assert ended.returncode == 0, ended.stderr
    shown = os.read(command, 100_000).decode()
    os.close(command)
    lines = shown.replace("\r\n", "\n").split("\n")
    (epoch,) = [line for line in lines if line.startswith("epoch 0/0  3/3  ")]
    assert epoch.endswith("a_long_name_of_a_loss 0.1235")
    assert lines[-3:] == ["test:", "  test_[bold]_\\xfc  0.5", ""]


def test_a_line_that_is_overwritten_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "20")
    shown = Lines(0.5, screen := Screen(), rewrites=True)
    shown.refresh(Row("epoch 0/2", total=40, values="loss 0.5"))
    assert screen.getvalue() == "epoch 0/2  0/40  -…"
    shown.say("stays, however long it is")
    assert screen.getvalue().endswith("\rstays, however long it is\n")


def test_console_without_extras_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stratagem.discovery.exports._offers", lambda module, kind: [])
    bar = ProgressBar(console=object())  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="has no 'TerminalDisplay'"):
        trainer_with(callbacks=bar).fit(Logs(), numbers())


SCRIPT = """
import sys
import torch
from torch import nn
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyboardInterrupt
        return self.net(batch).sum()
    test_step = training_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

{before}
trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_checkpointing=False)
trainer.{stage}(Net(), torch.ones(4, 1, 1))
"""


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (
            "fit",
            "stratagem: interrupted in epoch 0, after step 1\n"
            "stratagem: there is no checkpoint yet\n",
        ),
        ("test", "stratagem: test was interrupted, after 1 batch\n"),
    ],
)
def test_ctrl_c_prints_two_lines(stage: str, expected: str) -> None:
    script = SCRIPT.format(before="", stage=stage)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stderr == f"\n{expected}"
    assert ended.returncode == -signal.SIGINT


def test_a_hook_for_errors_that_the_user_has_set_sees_ctrl_c() -> None:
    script = SCRIPT.format(
        before="sys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)",
        stage="fit",
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "mine KeyboardInterrupt\n"
