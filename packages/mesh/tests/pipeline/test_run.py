"""Steps of a pipeline on real ranks, beside one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem_mesh.pipeline.run import added

SCRIPT = Path(__file__).parents[1] / "scripts/pipeline_steps.py"


def run(folder: Path, ranks: int, what: str, **further: Any) -> list[Any]:
    """Return what each position wrote."""
    run_file(SCRIPT, str(ranks), what, folder=folder, **further)
    return [json.loads((folder / f"out{position}.json").read_text()) for position in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_equal_one_process_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    for position in run(tmp_path, ranks, "steps"):
        assert len(position) == 20
        for case, told in position.items():
            assert told == dict.fromkeys(("equal", "in order", "idle", "others"), True), case


def test_a_stage_that_fails_ends_the_other_ranks_in_seconds(tmp_path: Path) -> None:
    first, failing, last = run(tmp_path, 3, "failing")
    assert failing["error"] == "ZeroDivisionError: of the stage"
    assert failing["doing"] == "backward of stage 1, micro-batch 1"
    for other in (first, last):
        assert other["error"].startswith("RuntimeError: ")
        assert other["seconds"] < 30
    assert re.fullmatch(
        r"backward of stage 0, micro-batch [01], waits for a gradient of stage 1", first["doing"]
    )
    assert re.fullmatch(
        r"forward of stage 2, micro-batch [23], waits for a value of stage 1", last["doing"]
    )


def test_a_wait_ends_by_the_timeout_of_the_groups_and_names_the_stage(tmp_path: Path) -> None:
    waiting, _ = run(tmp_path, 2, "late")
    assert "Timed out waiting 2000ms" in waiting["error"]
    assert waiting["doing"] == "backward of stage 0, micro-batch 1, waits for a gradient of stage 1"


def test_a_value_of_another_shape_is_refused_before_the_send(tmp_path: Path) -> None:
    refusing, waiting = run(tmp_path, 2, "longer")
    made = "(6, 4) float32, (4, 1) bool, () float64, (0, 3) bfloat16"
    assert refusing["error"] == (
        f"UserCodeError: the forward of stage 0, micro-batch 0, made (8, 6) float32, {made} for "
        f"the later stages: expected (4, 6) float32, {made}, as in the dry run. Shapes between "
        "stages may depend on the shapes of the batch alone"
    )
    assert waiting["error"].startswith("RuntimeError: ")


def test_sent_tensors_are_freed_during_the_step(tmp_path: Path) -> None:
    # Freed memory of 16 MB goes back to the system, so the peak counts what is held.
    environment = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    for growth in run(tmp_path, 2, "growth", env=environment, fresh=True):
        assert growth < 8 * 16


def test_gradients_are_added_in_their_order() -> None:
    large, one = torch.tensor(1e8), torch.tensor(1.0)
    assert added([one]) is one
    assert added([large, -large, one]).item() == 1
    assert added([one, large, -large]).item() == 0
