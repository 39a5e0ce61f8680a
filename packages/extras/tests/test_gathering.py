"""What Lite gathers, pads and splits on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts" / "gathering.py"


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script found on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_file(SCRIPT, folder=folder)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]


def batches(size: int, samples: int = 9) -> list[list[int]]:
    """The samples in batches of all ranks together."""
    return [list(range(n, min(n + size, samples))) for n in range(0, samples, size)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("batches of 1, 0 workers", batches(2)),
        ("batches of 2, 0 workers", batches(4)),
        ("batches of 2, 1 workers", batches(4)),
        ("batches of 4, 0 workers", batches(8)),
        ("batches of 5, 0 workers", batches(10)),
        ("batches of 9, 0 workers", batches(18)),
        ("drop_last", batches(4)[:2]),
        ("one sample", [[0]]),
        ("shuffled", [list(range(9))] * 2),
        ("own sampler", [[8, 7, 6, 5], [4, 3, 2, 1], [0]]),
        ("DistributedSampler", batches(4)),
        ("list of tensors", [[b, [-n for n in b]] for b in batches(8)]),
        ("names", [[f"s{n}" for n in b] for b in batches(8)]),
        ("scalar", [[0.5, 1.5]] * 2),
        ("after the loop", list(range(9))),
        ("list after the loop", [str(n) for n in range(9)]),
        ("after an inner loop", list(range(9))),
        ("other after the loop", [0, 0]),
        ("uneven", [[0, 1, 5, 6, 7], [2, 3], [4]]),
        ("stream", [[0, 1, 10, 11], [2, 12]]),
        (
            "nested",
            [
                [[10 * n for n in b], [[n] for n in b], [f"s{n}" for n in b], sum(map(bool, b))]
                for b in batches(8)
            ],
        ),
    ],
)
def test_each_of_nine_samples_is_gathered_once(
    of_ranks: list[dict[str, Any]], name: str, expected: Any
) -> None:
    for found in of_ranks:
        assert found[name] == expected


def test_gather_for_metrics_refuses_uneven_values_on_every_rank(
    of_ranks: list[dict[str, Any]],
) -> None:
    for found in of_ranks:
        assert found["by class"] == (
            "gather_for_metrics() received [7, 7] rows on the ranks, whose last batch has 1 "
            "samples, of which 1 is repeated: expected a row for each sample. all_gather(), or "
            "all_reduce(), takes what is not counted by sample"
        )
        assert found["other structure"] == (
            "gather_for_metrics() received different numbers of tensors and lists on the ranks: "
            "[1, 2]; expected the same structure on each"
        )
        assert found["other shape"] == (
            "gather_for_metrics() received tensors of the shapes [[2, 1], [2, 2]] on the ranks; "
            "expected one shape but for the first dimension: call pad_across_processes(data, "
            "dim=1) before it"
        )
        assert found["no tensor"] == (
            "rank 0: gather_for_metrics() received a int; expected tensors, lists of objects, and "
            "dicts, lists and tuples of them"
        )
        assert found["split unevenly"] == (
            "split_between_processes() received a dict with entries of the lengths "
            "{'x': 1, 'y': 2}; expected one length"
        )


def test_tensors_are_padded_and_data_split(of_ranks: list[dict[str, Any]]) -> None:
    first, second = of_ranks
    assert [first["padded"], second["padded"]] == [[[1, -1], [1, -1]], [[2, 2], [2, 2]]]
    assert [first["padded first"], second["padded first"]] == [[[0, 7], 1], [[7, 7], 1]]
    assert first["split"] == [["a", "b"], ["a", "b"], [[0, 1], [1, 2]], ["a"]]
    assert second["split"] == [["c"], ["c", "c"], [[2, 2], [3, 3]], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scalar"), [("same", [0.0, 2.0]), ("parts", [0.0, 1.0, 2.0, 3.0])]
)
def test_ranks_that_compute_the_same_values_count_once_on_a_mesh(
    kind: str, scalar: list[float], tmp_path: Path
) -> None:
    """Of ranks that compute parts of a batch's values each part counts, without repeated ones."""
    run_file(SCRIPT.with_name("gathering_axes.py"), kind, folder=tmp_path)
    for rank in range(4):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert sorted(n for batch in found["tokens"] for n in batch) == list(range(14))
        assert found["tokens"][0][:4] == [0, 1, 2, 3]
        assert found["scalar"] == scalar
        assert found["split"] == [[1, 2], [3]][rank // 2]
        assert len(found["names"]) == (14 if kind == "parts" else 7)
