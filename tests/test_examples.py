"""Each program in examples/ trains: with what it prints, in one process and in two.

The programs run in forks of a process that has imported torch, with warnings as errors, as a user
starts them. Sizes are smaller than by default where a smaller run shows the same.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fixtures import RANK_VARIABLES, run_file

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
LONGEST = 139
Numbers = dict[str, list[float]]


@dataclass(frozen=True)
class Program:
    """What a program prints when it has learned.

    Attributes:
        learned: says so, given the numbers of each line "name: number ..." that it prints.
        arguments: make the run smaller.
        needs: packages without which it cannot run.
        strategies: further strategies that its first lines name and that are tried here.
    """

    learned: Callable[[Numbers], bool]
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = field(default=())


def falls(name: str, to: float = 1.0) -> Callable[[Numbers], bool]:
    """Whether a value is smaller after training, `to` times that from before at most."""
    return lambda found: found[name][1] < to * found[name][0]


def rises(name: str, above: float = 0.0) -> Callable[[Numbers], bool]:
    """Whether a value is larger after training, and more than `above`."""
    return lambda found: found[name][1] > max(found[name][0], above)


def reaches(name: str, value: float) -> Callable[[Numbers], bool]:
    """Whether the first number of a line is above a value."""
    return lambda found: found[name][0] > value


RUNS = {
    "digits.py": Program(reaches("val_acc", 0.9), ("--epochs", "6")),
    "gpt.py": Program(falls("val_loss", 0.75), ("--steps", "20"), strategies=("fsdp",)),
    "lora_bert.py": Program(rises("val_acc", 0.7), needs=("transformers", "peft")),
    "gan.py": Program(falls("off_circle", 0.5)),
    "diffusion.py": Program(falls("distance", 0.1), ("--epochs", "6")),
    "reinforcement.py": Program(rises("length", 40), ("--steps", "20")),
    "graph_network.py": Program(rises("val_acc", 0.6), ("--epochs", "4")),
    "time_series.py": Program(
        lambda found: found["val_mae"][0] < found["day_ago_mae"][0], ("--epochs", "4")
    ),
    "distillation.py": Program(
        lambda found: found["student_acc"][0] > 0.6 and found["teacher_acc"][0] > 0.9,
        ("--epochs", "24"),
    ),
    "contrastive.py": Program(rises("twin_acc", 0.08), ("--epochs", "20")),
    "streaming.py": Program(
        lambda found: found["val_loss"][0] < 0.8 and "resumed exactly" in found, ("--steps", "160")
    ),
    "k_fold.py": Program(reaches("val_acc", 0.8), ("--folds", "2", "--epochs", "3")),
    "ema.py": Program(
        lambda found: found["average"][0] < found["weights"][0], ("--epochs", "6"),
        strategies=("fsdp",),
    ),
    "lite_loop.py": Program(reaches("epoch 3", 0.0), ("--epochs", "4")),
    "custom_strategy.py": Program(reaches("val_acc", 0.8), ("--epochs", "3")),
    "custom_accelerator.py": Program(lambda found: found["train_loss"][0] < 1e-3),
}  # fmt: skip


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run a program in a folder; return what it printed."""
    program = RUNS[name]
    for package in program.needs:
        if not importlib.util.find_spec(package):
            pytest.skip(
                f"needs {package}: pip install {' '.join(program.needs)}, or "
                "`nox -s huggingface`, which runs it"
            )
    whole = (*program.arguments, *arguments)
    if not program.needs:
        return run_file(FOLDER / name, *whole, folder=folder).stdout
    # Warnings of third parties are not ours.
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    finished = subprocess.run(
        [sys.executable, FOLDER / name, *whole],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def numbers(printed: str) -> Numbers:
    """Return the numbers of each line "name: ..." or "name=...", the last line of a name."""
    found = {}
    for line in printed.splitlines():
        match = re.fullmatch(r"(?:\w+: )?([\w ]+)[:=] ?(.*)", line)
        if match:
            found[match[1]] = [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", match[2])]
    return found


def test_every_program_is_tried() -> None:
    assert sorted(RUNS) == PROGRAMS
    assert len(PROGRAMS) >= 16


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_is_short_and_documents_its_launch(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) <= LONGEST
    docstring = ast.get_docstring(ast.parse(text)) or ""
    launches = [line for line in docstring.splitlines() if line.startswith("    python ")]
    assert len(launches) >= 3, "one process, several, another strategy"
    assert all(f"examples/{name}" in line or "nox" in line for line in launches)
    assert any("--strategy" in line for line in launches)


def test_the_table_lists_every_program() -> None:
    table = (FOLDER / "README.md").read_text()
    listed = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \|", table, re.MULTILINE)
    assert sorted(listed) == PROGRAMS


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_program_learns(name: str, devices: int, tmp_path: Path) -> None:
    printed = run(name, tmp_path, "--devices", str(devices))
    assert RUNS[name].learned(numbers(printed)), printed


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, each) for name in RUNS for each in RUNS[name].strategies]
)
def test_a_program_learns_under_another_strategy(name: str, strategy: str, tmp_path: Path) -> None:
    printed = run(name, tmp_path, "--devices", "2", "--strategy", strategy)
    assert RUNS[name].learned(numbers(printed)), printed


@pytest.mark.parametrize("devices", [1, 2])
def test_the_stream_is_resumed_exactly(devices: int, tmp_path: Path) -> None:
    printed = run("streaming.py", tmp_path, "--devices", str(devices))
    assert "resumed exactly: True" in printed


def test_lite_loop_example_resumes(tmp_path: Path) -> None:
    whole = run("lite_loop.py", tmp_path).splitlines()
    (tmp_path / "lite_loop.ckpt").unlink()
    first = run("lite_loop.py", tmp_path, "--epochs", "2").splitlines()
    second = run("lite_loop.py", tmp_path).splitlines()
    assert second[0] == "resumed after epoch 1"
    assert [*first, *second[1:]] == whole
    assert whole[0].split()[3] > whole[-1].split()[3], "the loss went down"


def test_ranks_of_the_custom_accelerator_have_cores_of_their_own(tmp_path: Path) -> None:
    printed = run("custom_accelerator.py", tmp_path, "--devices", "2", "--epochs", "1")
    cores = re.findall(r"cores of the ranks: \[(.*)\]", printed)
    used = cores[0].split(", ")
    assert len(used) == 2
    assert len(set(used)) == min(2, len(os.sched_getaffinity(0)))
