"""Programs that tests start, and what the ranks of train.py tell."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRAIN = HERE / "train.py"
RAY = str(Path(sys.executable).with_name("ray"))
PATIENCE = 400
"""Seconds, for any one wait: Ray is slow to start on a busy machine."""

_OURS = ("STRATAGEM_", "RAY_", "MASTER_", "TORCHELASTIC_", "SLURM_")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a rank or of another cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}


class Program:
    """A program in a session of its own, and what it prints."""

    def __init__(self, command: list[str], output: Path, environment: Mapping[str, str]) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=output.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, expect: int = 0) -> str:
        """Wait for its end; return what it has printed."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {PATIENCE} s:\n{self.text()}") from None
        assert code == expect, f"exit code {code}, expected {expect}:\n{self.text()}"
        return self.text()

    def result(self) -> dict[str, Any]:
        """Return what train.py has printed last."""
        printed: dict[str, Any] = json.loads(self.text().splitlines()[-1])
        return printed

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text(), self.text)

    def kill(self) -> None:
        """End it, and what is left in its session."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def wait_until(condition: Callable[[], bool], problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain: {problem()}"
        time.sleep(0.1)


class Told:
    """What the ranks of train.py have written into their files."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def lines(self, rank: int) -> list[dict[str, Any]]:
        file = self.out / f"rank{rank}.jsonl"
        return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []

    def starts(self, rank: int) -> list[dict[str, Any]]:
        """Return what it has told of itself at each start."""
        return [line for line in self.lines(rank) if "pid" in line]

    def steps(self, rank: int) -> list[int]:
        return [line["step"] for line in self.lines(rank) if "step" in line]

    def losses(self, rank: int) -> dict[int, float]:
        """Return its losses by step; of a step that was taken again, the last."""
        return {line["step"]: line["loss"] for line in self.lines(rank) if "step" in line}

    def resumed_from(self) -> Path:
        """Return the checkpoint that it has gone on from, by the first step taken again."""
        again = next(b for a, b in itertools.pairwise(self.steps(0)) if b <= a)
        (checkpoint,) = (self.out / "checkpoints").glob(f"*-step={again - 1}.ckpt")
        return checkpoint

    def check_went_on_as(self, undisturbed: Told) -> None:
        """Compare all losses since a checkpoint, bit for bit, with a run from there."""
        for rank in (0, 1):
            expected = undisturbed.losses(rank)
            assert f"step={min(expected) - 1}." in self.resumed_from().name
            assert {step: self.losses(rank)[step] for step in expected} == expected

    def have_taken(self, step: int, ranks: int = 2) -> Callable[[], bool]:
        return lambda: all(step in self.steps(rank) for rank in range(ranks))
