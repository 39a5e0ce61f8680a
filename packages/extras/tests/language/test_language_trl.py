"""A fine-tuning of TRL, and the same here; in `nox -s huggingface`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("trl", "peft"):
    pytest.importorskip(library, reason=f"needs {library}: `nox -s huggingface` has it")

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROUNDING = {"32-true": 1e-6, "bf16-mixed": 5e-4}
"""Relative. TRL divides losses by the number of labels, Stratagem gradients."""


def run(script: str, *arguments: str, folder: Path) -> None:
    """Run a script in which other libraries may warn."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    run("sft_documents.py", "llama", folder=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", ROUNDING)
def test_losses_of_each_step_are_those_of_trl(precision: str, folder: Path) -> None:
    """Packed documents, LoRA, accumulation, clipping, two epochs with a short last step."""
    found = []
    for name in ("trl", "stratagem"):
        run(f"sft_{name}.py", "llama", precision, f"{name}.json", folder=folder)
        found.append(json.loads((folder / f"{name}.json").read_text()))
    assert len(found[0]) == 18
    assert found[1] == pytest.approx(found[0], rel=ROUNDING[precision])
