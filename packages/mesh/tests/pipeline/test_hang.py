"""A stage that stops is named by the report of the others, with its micro-batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/pipeline_hang.py"
WAITS = "fit, epoch 0, step 1, forward of stage 1, micro-batch 2, waits for a value of stage 0"

pytestmark = pytest.mark.slow


def test_a_stage_that_hangs_is_named_with_its_line_and_micro_batch(tmp_path: Path) -> None:
    said = run_file(SCRIPT, "sleeps", folder=tmp_path, expect=1, timeout=300).stderr
    assert re.search(rf"rank 0: in .*\({WAITS}\)", said), said
    stuck = r"rank 1: in .*pipeline_hang\.py:\d+ in forward \(fit, epoch 0, step 1, forward of "
    assert re.search(stuck + r"stage 0, micro-batch 2\)", said), said


def test_a_stage_that_is_killed_is_named_by_the_value_that_another_waits_for(
    tmp_path: Path,
) -> None:
    said = run_file(SCRIPT, "dies", folder=tmp_path, expect=1, timeout=300).stderr
    assert re.search(rf"rank 0: in .*\({WAITS}\)\n.*rank 1 of 2 was ended by SIGKILL", said), said
