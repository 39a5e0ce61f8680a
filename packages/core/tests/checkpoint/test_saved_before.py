"""Checkpoints that version 0.1.0 wrote before its source was rearranged resume as they did then."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

DATA = Path(__file__).parents[1] / "files"
SCRIPT = Path(__file__).parents[1] / "saved_run.py"


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("single_file_0.1.0.zip", ()),
        ("directory_0.1.0", ("-m", "torch.distributed.run", "--nproc-per-node", "2")),
    ],
)
def test_a_checkpoint_of_0_1_0_resumes_to_the_same_losses(
    name: str, before: tuple[str, ...], run_script: RunScript
) -> None:
    losses = json.loads((DATA / f"{name}.losses.json").read_text())
    finished = run_script(SCRIPT.read_text(), "resume", str(DATA / name), before=before)
    assert json.loads(finished.stdout.splitlines()[-1]) == pytest.approx(losses, rel=1e-5)
