"""`stratagem report`: logs of runs as one HTML file."""

from __future__ import annotations

import json
import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from stratagem import Module, Trainer
from stratagem.callbacks import ThroughputMonitor
from stratagem.loggers import CSVLogger
from stratagem_extras.report.charts import POINTS, draw, grouped, short, thinned
from stratagem_extras.report.command import report
from stratagem_extras.report.logs import Run, Series, find_runs, read_run
from stratagem_extras.report.page import write_page

VOID = {"meta", "br", "link"}


class Page(HTMLParser):
    """What a browser reads of a page.

    Attributes:
        texts: the texts outside of scripts and styles.
        tags: the names of its elements.
        outside: addresses that it would load something from.
        open: elements that are not closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.outside += [
            value or ""
            for name, value in attrs
            if name in {"src", "href"} and (value or "")[:1] != "#"
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


def write_run(folder: Path, text: str, **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_bytes(
        text.replace("\n", "\r\n").encode("utf-8", "surrogateescape")
    )
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def page_of(*folders: Path, output: Path) -> Page:
    assert report([*map(str, folders), "--output", str(output)]) == 0
    page = Page(output.read_text())
    assert page.open == []
    return page


def row_of(page: Page, first: str) -> str:
    text = "|".join(page.texts)
    return text[text.index(first) :][:200]


# -- a real run


class Line(Module):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(batch) - 2 * batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch) - 2 * batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Train twice in `tmp_path`, with different learning rates; return the folder of the runs."""
    samples: Any = torch.linspace(-1, 1, 32).reshape(-1, 1)
    data = torch.utils.data.DataLoader[Any](samples, 4)
    for lr in (0.1, 0.3):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            default_root_dir=tmp_path,
            callbacks=["lr_monitor", ThroughputMonitor(len, window_size=2)],
            enable_progress_bar=False,
        )
        trainer.fit(Line(lr), data, data)
    return tmp_path / "stratagem_logs"


def test_runs_of_a_trainer_stand_side_by_side(trained: Path, tmp_path: Path) -> None:
    page = page_of(trained, output=tmp_path / "report.html")
    for text in (
        "2 runs",
        "Losses",
        "train_loss",
        "Validation and test",
        "val_loss",
        "Checkpoints",
    ):
        assert text in page.texts
    assert {"Learning rates", "lr-SGD", "Throughput"} <= set(page.texts)
    assert page.texts.count("version_0") > 3
    assert "success" in row_of(page, "version_1")
    assert row_of(page, "|lr|").startswith("|lr|0.1|0.3|")
    assert any(text.startswith("epoch=1-step=16") for text in page.texts)


def test_the_page_loads_nothing_from_elsewhere(trained: Path, tmp_path: Path) -> None:
    page = page_of(trained, output=tmp_path / "report.html")
    assert page.outside == []
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r"https?://|@import|url\(", text) == []
    assert "prefers-color-scheme: dark" in text


def test_report_chart_draws_the_logged_values(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "step,train_loss\n0,4\n10,2\n20,1.5\n")
    run = read_run(folder, "run")
    assert list(run.series["train_loss"].values) == [4, 2, 1.5]
    ((chart,),) = grouped([run]).values()
    figure = draw(chart)
    assert 'data-points="0,4 10,2 20,1.5"' in figure
    (places,) = re.findall(r'polyline points="([^"]+)"', figure)
    tops = [float(place.split(",")[1]) for place in places.split()]
    assert tops == sorted(tops), "smaller values are lower, that is, have a larger y"
    ElementTree.fromstring(re.findall(r"<svg.*?</svg>", figure)[0])


def test_the_end_of_a_fit_names_the_command(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: Any = torch.ones(8, 1)
    data = torch.utils.data.DataLoader[Any](samples, 4)
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=trained.parent)
    trainer.fit(Line(), data)
    shown = "".join(capsys.readouterr())
    assert f"stratagem: to see its logs: stratagem report '{trained / 'version_2'}'" in shown


# -- what logs may be


def test_resumes_are_marked(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        "step,loss\n0,4\n10,2\n20,1\n",
        metrics_cut_csv="step,loss\n10,3\n11,3\nstep,loss\n15,2\n",
    )
    assert read_run(folder, "run").resumed == [10, 15]
    text = write_page([read_run(folder, "run")])
    assert text.count("<title>resumed at step") == 2
    assert "10, 15" in Page(text).texts


def test_rows_of_a_validations_batches_are_read_by_their_numbers(tmp_path: Path) -> None:
    """Their optimizer steps are no metric, but say where the run was resumed."""
    folder = write_run(
        tmp_path / "run",
        "step,loss,x-trainer/optimizer_step,my_trainer/optimizer_step\n0,4,,\n90,2,0,\n91,1,0,7\n",
        metrics_cut_csv="step,trainer/optimizer_step,x-trainer/optimizer_step\n92,,10\n11,,\n",
    )
    run = read_run(folder, "run")
    assert run.resumed == [10]
    assert list(run.series) == ["loss", "my_trainer/optimizer_step"]
    assert list(run.series["loss"].steps) == [0, 90, 91]


def test_unreadable_moved_rows_are_noted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "step,loss\n0,4\n", metrics_cut_csv="step,loss\nx,3\n")
    assert read_run(folder, "run").notes == ["metrics.cut.csv cannot be read"]


def test_steps_of_ranks_are_in_one_chart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "step,rank0/step_time,rank1/step_time\n0,1,2\n1,1,3\n")
    charts = grouped([read_run(folder, "run")])
    ((chart,),) = charts.values()
    assert list(charts) == ["Step times by rank"]
    assert [line.label for line in chart.lines] == ["rank0", "rank1"]


def test_runs_with_different_metrics_are_drawn(tmp_path: Path) -> None:
    one = write_run(tmp_path / "logs/one", "step,train_loss\n0,1\n1,0.5\n", hparams_json='{"a": 1}')
    two = write_run(tmp_path / "logs/two", "step,val_acc\n0,0.1\n1,0.9\n")
    page = page_of(one, two, output=tmp_path / "report.html")
    assert row_of(page, "|train_loss|0.5 |").startswith("|train_loss|0.5 |(0.5 to 1)|-|")
    assert {"one", "two", "train_loss", "val_acc"} <= set(page.texts)


def test_strings_of_logs_are_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    quoted = '"' + evil.replace('"', '""') + '_loss"'
    folder = write_run(
        tmp_path / f"x & {evil.replace('/', '')}",
        f"step,{quoted},a'\"onload=x\n0,1,2\n1,2,3\n",
        hparams_json=json.dumps({evil: evil, "list": [evil], "control": "\x1b[2J"}),
        **{"_writer": f"{evil} 1"},
    )
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "<img src=x onerror=alert(1)>.ckpt").write_bytes(b"1")
    page = page_of(folder, output=tmp_path / "report.html")
    assert page.tags.count("script") == 1
    assert page.tags.count("img") == 0
    assert page.outside == []
    assert f"{evil}_loss" in page.texts
    assert not any("\x1b" in text for text in page.texts)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("step,loss\n0,1\n1,2\n2,0.", "the last row was cut short and is left out"),
        ("step,loss\n0,1\n1\nx,2\n1,2\n", "2 row(s) that are not complete are left out"),
        ("loss\n1\n2\n", "there is no column 'step', so rows are counted"),
    ],
)
def test_damaged_rows_are_omitted_with_a_note(tmp_path: Path, text: str, note: str) -> None:
    run = read_run(
        write_run(tmp_path / "run", text.rstrip("\n") + "\n" * text.endswith("\n")), "run"
    )
    assert run.notes == [note]
    assert list(run.series["loss"].steps) == [0, 1]
    assert list(run.series["loss"].values) == [1, 2]
    assert note in "".join(Page(write_page([run])).texts)


@pytest.mark.parametrize("text", ["", "step,loss\n", "step\n1\n", "step,loss\n0,\n"])
def test_a_log_without_values_is_a_page_that_says_so(tmp_path: Path, text: str) -> None:
    page = page_of(write_run(tmp_path / "run", text), output=tmp_path / "report.html")
    assert "run: no value was logged" in page.texts


@pytest.mark.parametrize("data", [b"\xff\xfe\x00\x01,\n\x80\n", b'step,"loss\n' + b"1,2\n" * 9])
def test_bytes_that_are_no_log_end_in_a_note(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_bytes(data)
    assert read_run(tmp_path / "run", "run").notes
    page_of(tmp_path / "run", output=tmp_path / "report.html")


def test_values_that_are_not_finite_are_counted_and_not_drawn(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", "step,loss,lost\n0,1,nan\n1,nan,nan\n2,inf,nan\n3,0.5,nan\n"
    )
    page = page_of(folder, output=tmp_path / "report.html")
    assert "2 value(s) not finite" in page.texts
    assert "no finite value" in page.texts
    assert "nan" not in "".join(
        re.findall(r'points="[^"]*"', (tmp_path / "report.html").read_text())
    )


def test_a_run_that_wrote_steps_twice_is_drawn_in_order() -> None:
    series = Series()
    for step in (0, 5, 10, 5, 10, 15):
        series.steps.append(step)
        series.values.append(step)
    assert [step for step, _ in thinned(series)] == [0, 5, 5, 10, 10, 15]


def test_a_long_log_is_thinned_and_keeps_its_extremes() -> None:
    series = Series()
    for step in range(100_000):
        series.steps.append(step)
        series.values.append(9.0 if step == 77_777 else math.sin(step))
    points = thinned(series)
    assert len(points) <= POINTS
    assert (77_777, 9.0) in points
    assert (points[0][0], points[-1][0]) == (0, 99_999)


def test_a_million_rows_take_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "metrics.csv").open("w") as file:
        file.write("step,loss\n")
        file.writelines(f"{step},{1 / (step + 1)}\n" for step in range(1_000_000))
    began = time.process_time()
    page_of(folder, output=tmp_path / "report.html")
    assert time.process_time() - began < 20
    assert (tmp_path / "report.html").stat().st_size < 100_000


# -- TensorBoard


def test_files_of_tensorboard_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from stratagem.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, name="board")
    logger.log_hyperparams({"lr": 0.5})
    for step in range(3):
        logger.log_metrics({"train_loss": 1.0 / (step + 1)}, step)
    logger.finalize("success")
    (folder,) = find_runs([tmp_path])
    run = read_run(folder, "run")
    assert list(run.series["train_loss"].steps) == [0, 1, 2]
    assert run.series["train_loss"].values[1] == pytest.approx(0.5)
    assert run.hyperparameters == {"lr": "0.5"}


def test_damaged_files_of_tensorboard_end_in_a_note(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"\x00" * 100)
    assert read_run(tmp_path, "run").notes


# -- the command


def test_folders_of_runs_are_found_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        write_run(tmp_path / f"logs/version_{number}", "step,loss\n0,1\n")
    found = find_runs([tmp_path, tmp_path / "logs" / "version_9" / "metrics.csv"])
    assert [path.name for path in found] == ["version_1", "version_9", "version_10"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothere"], "'nothere': there is no such file or folder: give the folder of a run"),
        (["."], "'.': expected a folder with logs (metrics.csv, or TensorBoard's events.out.tf"),
        (["run", "--output", "no/x.html"], "--output no/x.html: expected a file in a folder that"),
        (["run", "--output", "run"], "Is a directory"),
    ],
)
def test_report_errors_name_the_expected_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        write_run(tmp_path / "run", "step,loss\n0,1\n")
    assert report(arguments) == 2
    assert message in capsys.readouterr().err


def test_report_draws_the_last_24_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        write_run(tmp_path / f"logs/version_{number}", "step,loss\n0,1\n1,2\n")
    page = page_of(tmp_path / "logs", output=tmp_path / "report.html")
    assert "30 runs found; the last 24 are drawn" in capsys.readouterr().err
    assert "24 runs" in page.texts
    assert "version_29" in page.texts
    assert "version_5" not in page.texts


def test_a_path_with_other_bytes_is_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"run\xff"), "step,loss\n0,1\n1,2\n")
    page = page_of(folder, output=tmp_path / "report.html")
    assert "loss" in page.texts


def test_rows_of_a_csv_logger_are_read_whatever_its_names(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="one")
    logger.log_metrics({'a "quoted", name\nof two lines': 1.0, "b": 2.0}, 3)
    logger.finalize("success")
    run = read_run(tmp_path / "one", "one")
    assert {name: list(each.values) for name, each in run.series.items()} == {
        r'a "quoted", name\nof two lines': [1.0],
        "b": [2.0],
    }
    assert run.notes == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12, "12"), (12345, "12.35k"), (3.2e9, "3.2G"), (-5e6, "-5M")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_a_run_without_anything_is_a_page() -> None:
    assert Page(write_page([Run("empty", Path("x"))])).open == []
