"""What the examples of docs/guides/logging.md and command-line.md print and write."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[1] / "docs" / "guides"
LOGGERS = (GUIDES / "logging.md").read_text()
COMMAND_LINE = (GUIDES / "command-line.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path, **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


IN_ONE_PROCESS = """
import os, runpy, shlex, sys
from stratagem import Trainer

fit = Trainer.fit

def counted(trainer, *args, **kwargs):
    fit(trainer, *args, **kwargs)
    print(f"steps {trainer.global_step}, epochs {trainer.current_epoch}")

Trainer.fit = counted
for command in sys.argv[1:]:
    program, *sys.argv = shlex.split(command)
    last = command == "python program.py fit"
    os.environ.update({"STRATAGEM_FIT__TRAINER__MAX_EPOCHS": "3"} if last else {})
    try:
        if program == "stratagem":
            sys.argv.insert(0, program)
            runpy.run_module("stratagem", run_name="__main__")
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
    print("---", flush=True)
"""
"""Runs commands one after the other: each process of its own would import torch again."""


def test_resumed_run_appends_to_the_csv_log(tmp_path: Path) -> None:
    script = blocks(LOGGERS, "python")[0]
    run(["-c", script], tmp_path)
    rows = (tmp_path / "logs" / "line" / "version_0" / "metrics.csv").read_text().splitlines()
    assert list(dict.fromkeys(row.split(",")[0] for row in rows)) == ["step", *"01234567"]


def test_the_command_lines_of_the_page_run(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    for text in (*blocks(COMMAND_LINE, "yaml"), *blocks(COMMAND_LINE, "python")):
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    lines = "".join(blocks(COMMAND_LINE, "console")).splitlines()
    commands = [line.removeprefix("$ ") for line in lines]
    said = run(["-c", IN_ONE_PROCESS, *commands, "python program.py fit"], tmp_path)
    first, longer, printed, asked, own, linked, by_variable, _ = said.split("\n---\n")
    assert "steps 4, epochs 1" in first
    assert "steps 4, epochs 2" in longer
    assert "class_path: mine.Line" in printed
    assert "gradient_clip_val: null" in printed
    assert "--trainer.max_epochs" in asked
    assert "steps 4, epochs 1" in own
    assert "steps 4, epochs 2" in linked
    assert "steps 12, epochs 3" in by_variable
    assert (tmp_path / "stratagem_logs" / "version_0" / "config.yaml").exists()
