"""Losses that are means over different numbers of tokens, under each strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts" / "loss_weights.py"


TRIED = [("single_device", 1, 5), ("ddp", 2, 2), ("fsdp", 2, 4), ("ddp_sharded", 2, 1)]
SEVERAL = ("ddp", "fsdp", "ddp_sharded", "model_parallel")
MATRIX = [("single_device", 1), *((name, ranks) for name in SEVERAL for ranks in (2, 4))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        *TRIED,
        *(
            pytest.param(name, ranks, accumulate, marks=pytest.mark.long)
            for name, ranks in MATRIX
            for accumulate in (1, 2, 4)
        ),
    ],
)
def test_loss_weight_gives_the_mean_over_all_tokens_of_a_step(
    strategy: str, ranks: int, accumulate: int, tmp_path: Path
) -> None:
    """Two epochs with clipping equal one process that concatenates the batches of each step.

    Some batches have no valid token, so that their loss is NaN. The last step of an epoch is
    smaller where `accumulate` does not divide the batches.
    """
    run_file(SCRIPT, strategy, str(ranks), str(accumulate), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    expected = found.pop("reference")
    assert found.keys() == {"trainer", "lite", "step"}
    for name, weights in found.items():
        assert weights == pytest.approx(expected, rel=0, abs=1e-6), name
