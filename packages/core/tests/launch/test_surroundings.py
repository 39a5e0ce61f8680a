"""What a process finds around it: arguments of any bytes, no streams, folders nobody can make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError
from stratagem.loggers import CSVLogger

SCRIPT = Path(__file__).parents[1] / "scripts" / "surroundings.py"
RUN = ("-m", "stratagem", "run")

Start = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def start(tmp_path: Path, script_environment: dict[str, str]) -> Start:
    """Run Python in tmp_path with some arguments, and without the file descriptors in `closed`."""

    def close(descriptors: tuple[int, ...]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def run(
        *arguments: str | bytes | Path, closed: tuple[int, ...] = ()
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=script_environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=90,
            check=False,
            preexec_fn=lambda: close(closed),
        )

    return run


# ---------------------------------------------------------------- arguments and paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "arguments", "steps"),
    [
        ((), ("single_device", "1"), "8"),
        ((), ("ddp", "2"), "4"),
        ((*RUN, "--devices", "2"), ("ddp", "2"), "4"),
    ],
    ids=["single_device", "ddp", "run"],
)
def test_arguments_and_folders_may_be_any_bytes(
    before: tuple[str, ...],
    arguments: tuple[str, ...],
    steps: str,
    start: Start,
    tmp_path: Path,
) -> None:
    ended = start(*before, SCRIPT, *arguments, b"runs\xff")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "steps0").read_text() == steps
    assert b"runs\\udcff" in ended.stdout
    logs = tmp_path / os.fsdecode(b"runs\xff") / "stratagem_logs"
    assert list(logs.glob("*/checkpoints/*.ckpt"))


# ---------------------------------------------------------------- standard streams


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "strategy", "devices", "steps"),
    [
        ((1,), "single_device", 1, "8"),
        ((2,), "ddp", 2, "4"),
        ((0, 1, 2), "ddp", 2, "4"),
    ],
)
def test_training_needs_no_standard_streams(
    closed: tuple[int, ...],
    strategy: str,
    devices: int,
    steps: str,
    start: Start,
    tmp_path: Path,
) -> None:
    ended = start(SCRIPT, strategy, str(devices), "runs", closed=closed)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "steps0").read_text() == steps
    # What was meant for a stream that is not there does not appear in the other one.
    assert b"a message to nobody" not in ended.stdout


STREAMS = """
import os, subprocess, sys
sys.path.insert(0, os.getcwd())
if len(sys.argv) > 1:
    # Something else gets the number 1 before anybody looks.
    taken = os.open("taken", os.O_WRONLY | os.O_CREAT)
    assert taken == 1
    os.set_inheritable(1, True)
from stratagem.launch.process import open_standard_streams
open_standard_streams()
print("to stdout", flush=True)
print("to stderr", file=sys.stderr, flush=True)
look = "import sys; sys.exit(sys.stdout is None or sys.stderr is None)"
sys.exit(subprocess.run([sys.executable, "-c", look]).returncode)
"""


def test_closed_streams_are_dev_null_also_for_children(start: Start) -> None:
    for closed in ((1,), (2,), (1, 2), (0, 1, 2)):
        ended = start("-c", STREAMS, closed=closed)
        assert ended.returncode == 0, ended.stderr
        expected = (b"" if 1 in closed else b"to stdout\n", b"" if 2 in closed else b"to stderr\n")
        assert (ended.stdout, ended.stderr) == expected


def test_file_with_the_descriptor_of_stdout_stays_empty(start: Start, tmp_path: Path) -> None:
    ended = start("-c", STREAMS, "taken", closed=(1,))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "taken").read_bytes() == b""


@pytest.mark.parametrize("closed", [(1,), (2,)])
@pytest.mark.parametrize("command", [("strategies",), ("doctor",), ("run",)])
def test_the_program_needs_no_standard_streams(
    closed: tuple[int, ...], command: tuple[str, ...], start: Start
) -> None:
    ended = start("-m", "stratagem", *command, closed=closed)
    assert ended.returncode == (2 if command == ("run",) else 0), ended.stderr
    assert b"Traceback" not in ended.stderr
    assert bool(ended.stdout) == (closed == (2,) and command != ("run",))


def test_the_program_prints_paths_of_any_bytes(start: Start, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.ckpt")
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    lite.save(path, {"step": torch.tensor(1)})
    ended = start("-m", "stratagem", "checkpoint", "verify", path)
    assert ended.returncode == 0, ended.stderr
    assert b"\\udcff.ckpt: " in ended.stdout


# ---------------------------------------------------------------- folders


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader[Any]:
    return DataLoader(torch.arange(4.0), batch_size=2)  # type: ignore[arg-type]


def trainer(**arguments: Any) -> Trainer:
    arguments = {"strategy": "single_device", "devices": 1, "logger": False, **arguments}
    return Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, **arguments)


@pytest.fixture(params=["/proc/none/logs", "below a file"])
def impossible(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that nobody can make, not even root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "logs" if request.param == "below a file" else Path(request.param)


def with_root(folder: Path, **arguments: Any) -> Trainer:
    return trainer(default_root_dir=folder, **arguments)


def with_logger(folder: Path, **arguments: Any) -> Trainer:
    return trainer(**{**arguments, "logger": CSVLogger(folder)})


def with_saver(folder: Path, **arguments: Any) -> Trainer:
    return trainer(callbacks=ModelCheckpoint(folder), **arguments)


def with_loggers_root(folder: Path, **arguments: Any) -> Trainer:
    return trainer(**{**arguments, "default_root_dir": folder, "logger": True})


@pytest.mark.parametrize("strategy", ["single_device", "ddp_spawn"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (with_root, "default_root_dir"),
        (with_loggers_root, "default_root_dir"),
        (with_logger, "CSVLogger: save_dir"),
        (with_saver, "ModelCheckpoint: dirpath"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(
    make: Callable[..., Trainer],
    named: str,
    strategy: str,
    impossible: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(impossible, strategy=strategy, devices=1 if strategy == "single_device" else 2)
    if strategy == "ddp_spawn":
        monkeypatch.setattr(made.runtime, "launch", lambda *_: pytest.fail("it was launched"))
    with pytest.raises(ConfigurationError) as caught:
        made.fit(Line(), batches())
    said = str(caught.value)
    assert said.startswith(f"{named}={str(impossible)!r} is no folder that can be written to (")
    assert "No such file or directory" in said or "Not a directory" in said
    assert "pass one that can, or make room or rights for it" in said


def test_folders_are_tried_only_where_something_is_written(impossible: Path) -> None:
    nothing = with_root(impossible, enable_checkpointing=False)
    nothing.fit(Line(), batches())
    assert len(with_loggers_root(impossible).predict(Line(), batches())) == 2
    with_root(impossible).validate(Line(), batches())
    with pytest.raises(ConfigurationError, match="is no folder that can be written to"):
        with_loggers_root(impossible).validate(Line(), batches())


def test_write_check_leaves_no_file(tmp_path: Path) -> None:
    with_root(tmp_path / "new", fast_dev_run=True).fit(Line(), batches())
    assert not (tmp_path / "new").exists()
    never = ModelCheckpoint(tmp_path / "new", every_n_epochs=5)
    trainer(callbacks=never).fit(Line(), batches())
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.slow
def test_ranks_that_were_started_by_others_refuse_a_folder_together(start: Start) -> None:
    ended = start(*RUN, "--devices", "2", SCRIPT, "ddp", "2", "/proc/none")
    assert ended.returncode == 1
    assert b"ConfigurationError: default_root_dir='/proc/none' is no folder" in ended.stderr


def test_a_logger_without_a_trainer_names_its_folder(impossible: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CSVLogger(impossible).log_metrics({"loss": 1.0}, 0)
    assert f"CSVLogger: the folder {str(impossible / 'stratagem_logs')!r} cannot be made (" in str(
        caught.value
    )
    assert "pass a save_dir that can be written to" in str(caught.value)


def test_removed_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError) as caught:
        trainer()
    assert "default_root_dir=None means the current folder, which is gone (" in str(caught.value)
    assert "change to one that is there, or pass default_root_dir" in str(caught.value)
    trainer(default_root_dir=tmp_path)
