"""The progress bars of a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from shown_runs import Logs, numbers, trainer_with

from stratagem.callbacks import ProgressBar


def test_the_progress_bar_is_drawn_in_the_encoding_of_its_terminal() -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=screen, force_terminal=True, width=150)
    model = Logs(lambda m, batch, i: m.log("Verlust_ü[/x]", 0.5, prog_bar=True))
    bar = ProgressBar(refresh_seconds=0.0, console=console)
    trainer_with(enable_progress_bar=True, callbacks=bar).fit(model, numbers())
    screen.seek(0)
    assert "Verlust_\\xfc[/x] 0.5" in screen.read()


def test_progress_bar_shows_values_with_prog_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    model = Logs(
        lambda m, batch, i: m.log("loss", batch.mean(), prog_bar=True, on_epoch=True),
        lambda m, batch, i: m.log("val_acc", 0.875, prog_bar=True),
    )
    trainer = trainer_with(
        callbacks=ProgressBar(refresh_seconds=0.0, console=console),
        max_epochs=2,
    )
    trainer.fit(model, numbers(), numbers())
    shown = screen.getvalue()
    for text in (
        "epoch 0/1",
        "epoch 1/1",
        "3/3",
        " it/s",
        "left 0:0",
        "loss_step 8.5",
        "loss_epoch 4.5",
        "val_acc 0.875",
    ):
        assert text in shown, text
    assert trainer.progress_bar_metrics == {
        "loss_step": 8.5,
        "loss_epoch": pytest.approx(4.5),
        "val_acc": 0.875,
    }


@pytest.mark.parametrize("width", [50, 80, 120])
def test_narrow_terminal_marks_cut_values(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    model = Logs(lambda m, batch, i: m.log("a_long_name_of_a_loss", 0.123456, prog_bar=True))
    bar = ProgressBar(refresh_seconds=0.0, console=console)
    trainer_with(callbacks=bar, max_epochs=2).fit(model, numbers())
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", drawn) if re.search(r"[━╸╺ ] [12]/3  ", line)]
    assert len(lines) >= 4
    for line in lines:
        assert line.startswith(("epoch 0/1    ", "epoch 1/1    "))
        assert line.rstrip().endswith(("a_long_name_of_a_loss 0.1235", "…"))
        assert len(line) <= width
    assert any("…" in line for line in lines) == (width < 120)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_has_a_bar_of_its_own(stage: str) -> None:
    screen = io.StringIO()
    bar = ProgressBar(
        refresh_seconds=0.0, console=Console(file=screen, force_terminal=True, width=150)
    )
    model: Any = Logs(validate=lambda m, batch, i: None)
    model.test_step = model.predict_step = lambda batch, batch_idx: None
    getattr(trainer_with(callbacks=bar), stage)(model, numbers())
    assert {"validate": "validation"}.get(stage, stage) in screen.getvalue()
    assert "3/3  " in screen.getvalue()


def test_the_progress_bar_gives_the_terminal_back_after_an_error() -> None:
    class Interrupted(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise KeyboardInterrupt

    bar = ProgressBar(console=Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyboardInterrupt):
        trainer_with(callbacks=bar).fit(Interrupted(), numbers())
    assert bar._display is None
