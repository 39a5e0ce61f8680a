"""A run after an error of one rank, which DeepSpeed cannot train."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import run_script as run_script, script_environment as script_environment

SCRIPT = Path(__file__).parents[2] / "backend-torch" / "tests" / "scripts" / "failure_next_run.py"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_a_run_after_an_error_of_one_rank_is_refused_on_all(
    run_script: RunScript, tmp_path: Path
) -> None:
    run_script(SCRIPT.read_text(), "deepspeed_stage_2")
    for rank in (0, 1):
        *_, (_, _, refused, seconds) = json.loads((tmp_path / f"rank{rank}").read_text())
        assert seconds < 20
        assert refused == (
            "CommunicationError: DeepSpeedStrategy: a rank failed in an earlier run of this "
            "process, so the ranks have joined a new process group, and DeepSpeed keeps the first "
            "one: start each run in processes of its own, or let an error end the script"
        )
