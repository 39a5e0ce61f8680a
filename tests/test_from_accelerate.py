"""Accelerate's examples, converted to Lite, train with its numbers; so does from-accelerate.md.

tests/from_accelerate has four examples of Accelerate 1.15 as they are and as they were converted,
and small stand-ins for the data sets and models that they load. `nox -s accelerate` compares both.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stratagem import Lite
from stratagem.lite.lite import counterparts_of_accelerate

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = Path(__file__).parent / "from_accelerate"
PAGE = (ROOT / "docs" / "start" / "from-accelerate.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ARGUMENTS = {
    "cv_example": ["--data_dir", "pets"],
    "gradient_accumulation": ["--gradient_accumulation_steps", "2"],
    "checkpointing": ["--checkpointing_steps", "4", "--output_dir", "saved"],
    "tracking": ["--with_tracking", "--project_dir", "logs"],
}
NEW_LINES = {"cv_example": 4, "gradient_accumulation": 9, "checkpointing": 9, "tracking": 12}


def run(folder: Path, command: list[str]) -> str:
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def numbers(kind: str, name: str, folder: Path, *further: str) -> tuple[dict[str, Any], str]:
    """Run an example; return the losses of all forward passes with the weights, and the output."""
    pets = folder / "pets"
    pets.mkdir(parents=True, exist_ok=True)
    for number in range(25):
        (pets / f"kind{number % 3}_{number}.jpg").touch()
    example = [str(EXAMPLES / "run_example.py"), str(EXAMPLES / kind / f"{name}.py")]
    out = run(folder, [*example, "numbers.json", "--cpu", *ARGUMENTS[name], *further])
    return json.loads((folder / "numbers.json").read_text()), out


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_converted_example_trains(name: str, tmp_path: Path) -> None:
    found, out = numbers("converted", name, tmp_path)
    if name == "cv_example":
        assert len(found["losses"]) == 3 * (1 + 1)  # 20 images and 5, in batches of 64
        return
    assert len(found["losses"]) == 3 * (3 + 1)  # 39 samples and 9, in batches of 16 and 32
    assert out.count("'samples': 9") == 3
    assert found["losses"][-1] < found["losses"][3], "evaluated after the first epoch"
    if name == "tracking":
        assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))


def test_a_converted_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, _ = numbers("converted", "checkpointing", tmp_path)
    resumed, out = numbers(
        "converted", "checkpointing", tmp_path, "--resume_from_checkpoint", "saved/step_4"
    )
    assert "Resumed from checkpoint: saved/step_4" in out
    # In the second epoch, after the first of its 3 batches.
    assert resumed["losses"] == whole["losses"][5:]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"),
    reason="needs accelerate: `nox -s accelerate` runs it",
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_converted_example_has_the_numbers_of_the_original(name: str, tmp_path: Path) -> None:
    theirs, their_output = numbers("original", name, tmp_path / "original")
    ours, our_output = numbers("converted", name, tmp_path / "converted")
    assert ours == theirs
    assert our_output == their_output


@pytest.mark.parametrize("name", ARGUMENTS)
def test_few_lines_of_an_example_change(name: str) -> None:
    original, converted = (
        (EXAMPLES / kind / f"{name}.py").read_text().splitlines()
        for kind in ("original", "converted")
    )
    compared = list(difflib.unified_diff(original, converted, lineterm="", n=0))[2:]
    new = [line for line in compared if line.startswith("+")]
    assert len(new) == NEW_LINES[name] + 1, "one of them says that the file was changed"


# ---------------------------------------------------------------- docs/start/from-accelerate.md


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_page_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    run(tmp_path, ["script.py"])


def test_accelerate_page_lists_existing_names() -> None:
    table = PAGE.partition("## Names")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`\.(\w+)", cell)}
    assert len(names) > 30
    assert names <= counterparts_of_accelerate().keys() | set(dir(Lite))


def test_the_page_counts_the_lines_of_the_examples() -> None:
    for name, lines in NEW_LINES.items():
        assert re.search(rf"\| `[\w/]*{name}\.py` \| {lines} \|", PAGE), name
