"""Saved under any strategy and number of ranks, resumed under any other, with optimizer state.

Frozen and unused parameters, one without a dimension, two parameter groups, a scheduler,
accumulation and clipping; saved in the middle of an epoch, in both formats.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import run_file

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "state_matrix.py"
RANKS = (1, 2, 4)
WAYS = (
    "single_device",
    "fsdp on 1",
    "ddp",
    "ddp_sharded",
    "fsdp",
    "fsdp SHARD_GRAD_OP",
    "fsdp NO_SHARD",
    "fsdp HYBRID_SHARD",
    "model_parallel",
)
FORMATS = ("single_file", "directory")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """What each strategy loses without an interruption, and each pair with one."""
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "saved").mkdir()
    found: dict[str, dict[str, list[float]]] = {"save": {}, "resume": {}}
    for what, told in found.items():
        for ranks in RANKS:
            run_file(SCRIPT, str(ranks), what, "saved", folder=folder, timeout=300)
            told.update(json.loads((folder / f"{what}-{ranks}.json").read_text()))
    return found


@pytest.mark.parametrize("target", WAYS)
@pytest.mark.parametrize("source", WAYS)
def test_losses_after_a_resume_equal_an_uninterrupted_run_across_formats(
    source: str, target: str, losses: dict[str, dict[str, list[float]]]
) -> None:
    expected = losses["save"][source]
    assert len(expected) == 8  # four steps of two micro-batches
    for form in FORMATS:
        resumed = losses["resume"][f"{source}.{form} -> {target}"]
        if source == target:
            assert resumed == expected
        else:
            assert resumed == pytest.approx(expected, rel=0, abs=1e-6)
