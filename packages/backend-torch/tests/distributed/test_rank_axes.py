"""Four real ranks in a mesh of two axes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch.distributed as dist
from fixtures import run_file

from stratagem.environments import PlainEnvironment
from stratagem.strategies import ProcessGroupRanks

SCRIPT = Path(__file__).parents[1] / "scripts" / "rank_axes.py"


@pytest.mark.slow
def test_parts_of_a_batch_count_each(tmp_path: Path) -> None:
    """Losses, weights and logged values equal one process, without a change of the strategy."""
    run_file(SCRIPT, "context", folder=tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert found["weights"] == pytest.approx(found["reference"], rel=0, abs=1e-6)
    assert found["tokens"] == found["of epoch"]
    assert found["now"] == found["of step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "drift",
            "after step 3 parameters differ from those of rank 2 (data 1, tensor 0): rank 3 "
            "(data 1, tensor 1) in norm.bias. ",
        ),
        (
            "hybrid",
            "after step 3 parameters differ from those of rank 1 (replicate 0, shard 1): rank 3 "
            "(replicate 1, shard 1) in norm.bias. ",
        ),
        (
            "stages",
            "after step 1 parameters differ from those of rank 0 (data 0, stage 0): rank 2 "
            "(data 1, stage 0) in head.bias. ",
        ),
    ],
)
def test_divergence_of_copies_is_found_on_a_mesh(kind: str, said: str, tmp_path: Path) -> None:
    done = run_file(SCRIPT, kind, folder=tmp_path, expect=1)
    assert f"DivergenceError: {said}" in done.stderr
    assert ("STAGES MAY DIFFER" in done.stdout) is (kind == "stages")


@pytest.mark.slow
def test_errors_name_the_place_of_a_rank(tmp_path: Path) -> None:
    done = run_file(SCRIPT, "fails", folder=tmp_path, expect=1)
    assert "rank 1 of 4 (data 0, tensor 1) failed with exit code 1" in done.stderr


@pytest.mark.slow
def test_reports_of_hangs_name_what_ranks_have_in_common(tmp_path: Path) -> None:
    done = run_file(SCRIPT, "hangs", folder=tmp_path, expect=1)
    assert "ranks 1, 3 (tensor 1): in barrier, at" in done.stderr
    assert "ranks 0, 2 (tensor 0): in " in done.stderr


def test_groups_of_some_ranks_are_made_once_and_end_with_the_default_group(tmp_path: Path) -> None:
    for number in range(2):  # a default group after another
        file = (tmp_path / str(number)).as_uri()
        dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
        groups = []
        try:
            for _ in range(2):  # two strategies
                ranks = ProcessGroupRanks(PlainEnvironment(), 2)
                ranks.connect([0])
                with ranks.among([0]):
                    groups.append(ref(dist.group.WORLD))
            assert groups[0]() is groups[1]() is not dist.group.WORLD
        finally:
            dist.destroy_process_group()
        del ranks
        gc.collect()
        assert [group() for group in groups] == [None, None]
