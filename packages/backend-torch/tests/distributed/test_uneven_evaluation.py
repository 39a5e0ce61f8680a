"""Evaluations in which ranks have different numbers of batches, or none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file
from torch.utils.data import DataLoader

from stratagem.data.sharding import EqualBatches, ShardedSampler, knows_length, with_equal_batches

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    run_file(SCRIPTS / "uneven_cases.py", "waits", folder=folder, expect=1)
    return folder


@pytest.fixture(scope="module")
def ranks(cases: Path) -> list[dict[str, Any]]:
    return [json.loads((cases / f"{rank}.json").read_text()) for rank in (0, 1)]


Ranks = list[dict[str, Any]]


def test_users_collectives_in_uneven_evaluations_give_the_values_of_one_process(
    tmp_path: Path,
) -> None:
    options = ("--samples", "0", "1", "5", "7", "--json", "table.json")
    run_file(SCRIPTS / "uneven_users.py", "ddp", "3", *options, folder=tmp_path)
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table) == 16
    for _, _, hook, samples, verdict, _ in table:
        wanted = "right" if samples else "refused by 3 ranks: the "
        assert verdict.startswith(wanted), (hook, samples, verdict)


@pytest.mark.parametrize(
    ("case", "mean", "gathered"),
    [
        ("stream", 2.5, [[[1.0, 4.0], [2.0], [3.0]], [[1.0, 4.0]]]),
        ("claimed", 2.5, [[[1.0, 4.0], [2.0], [3.0]], [[1.0, 4.0]]]),
        ("one stream", 6.0, [[], [[4.0], [8.0]]]),
        ("own sampler", 2.5, [[[1.0, 2.0]], [[1.0, 2.0], [3.0], [4.0]]]),
        ("list", 1.0, [[[1.0, 1.0], [1.0]], [[1.0, 1.0]]]),
    ],
)
def test_the_ranks_that_have_a_batch_communicate(
    ranks: Ranks, case: str, mean: float, gathered: list[Any]
) -> None:
    assert [rank[case][1] for rank in ranks] == gathered
    assert [rank[case][0] for rank in ranks] == [[{"mean": mean, "mean_epoch": mean}]] * 2


def test_an_evaluation_without_any_batch_is_refused_on_all_ranks(ranks: Ranks) -> None:
    message = "UserCodeError: the test data loader yielded no batch; expected at least one"
    assert [rank["no stream"][0] for rank in ranks] == [message] * 2


def test_each_rank_returns_the_same_names_for_each_loader(ranks: Ranks) -> None:
    first, second = (
        {f"{name}/dataloader_idx_{index}": value for name in ("mean", "mean_epoch")}
        for index, value in ((0, 4.5), (1, 1.0))
    )
    assert [rank["two"][0] for rank in ranks] == [[first, second]] * 2


def test_a_metric_object_is_computed_on_ranks_without_a_batch(ranks: Ranks) -> None:
    reduced = dict.fromkeys(("mean", "mean_epoch", "metric", "metric_epoch"), 1.0)
    (first,), (second,) = (rank["metric"][0] for rank in ranks)
    assert first == {**reduced, "own": 1.0}
    # The value is not reduced over ranks, and this rank has logged none.
    assert math.isnan(second.pop("own"))
    assert second == reduced


def test_a_metric_object_that_a_rank_cannot_find_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["elsewhere"][0] == (
            "UserCodeError: self.log('metric', ...) of a metric object was called on some ranks "
            "only, as where other ranks have no batch, and the Module does not have the object: "
            "assign it to an attribute of the Module, so that all ranks can compute it"
        )


def test_a_broadcast_from_a_rank_without_a_batch_is_refused(ranks: Ranks) -> None:
    assert [rank["broadcast"][0] for rank in ranks] == [
        "UserCodeError: broadcast(src=1): expected a rank that has a batch left in this "
        "evaluation, one of 0; broadcast in a hook of the epoch, such as on_validation_epoch_end, "
        "which runs on all ranks",
        "CommunicationError: this rank (1) has no batch left for test_step, and rank(s) 0 failed",
    ]


def test_gathered_tensors_of_different_shapes_are_refused_on_all_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["at the end"][0] == (
            "UserCodeError: self.all_gather() received (2, 1) torch.float32 on rank 0; (1, 1) "
            "torch.float32 on rank 1; expected tensors of one shape and dtype. Ranks have "
            "different numbers of samples in the last batches of an evaluation, and in its epoch: "
            "self.trainer.ranks.gather_objects(tensor) returns a list of the ranks' tensors"
        )


def test_a_collective_that_waits_for_a_rank_without_a_batch_ends_within_seconds(
    cases: Path,
) -> None:
    texts = [json.loads((cases / f"waited{rank}.json").read_text()) for rank in (0, 1)]
    assert all(seconds < 30.0 for _, seconds in texts), "5.6 s, and 100 s by the timeout"
    assert texts[1][0].startswith(
        "CommunicationError: this rank (1) has no batch left for test_step, and the others wait "
        "for it in a collective:\n  rank 0: in all_reduce, at "
    )
    assert texts[1][0].endswith(
        "in wait (test, batch 2)\nIn an evaluation, ranks may have different numbers of batches. "
        "In a step, use self.all_gather or the collectives of trainer.ranks, which run among the "
        "ranks that have a batch, or communicate in a hook of the epoch's end"
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_batches_of_a_step_have_one_size_on_all_ranks(count: int) -> None:
    for samples in range(14):
        parts = [
            EqualBatches(ShardedSampler(range(samples), rank, count, even=False, seed=0), 2)  # type: ignore[arg-type]
            for rank in range(count)
        ]
        batches = [list(part) for part in parts]
        assert sorted(i for part in batches for batch in part for i in batch) == [*range(samples)]
        assert [len(part) for part in parts] == [len(part) for part in batches]
        steps = range(max(map(len, batches)))
        for step in steps:
            assert len({len(part[step]) for part in batches if len(part) > step}) == 1


def test_a_loader_that_drops_its_last_batch_or_is_not_divided_keeps_its_batches() -> None:
    part = ShardedSampler(range(7), 0, 2, even=False, seed=0)  # type: ignore[arg-type]
    samples: Any = range(7)
    loaders: list[DataLoader[Any]] = [
        DataLoader(samples, 2, sampler=part, drop_last=True),
        DataLoader(samples, 2),
    ]
    for loader in loaders:
        assert with_equal_batches(loader) is loader


def test_a_length_that_user_code_computes_is_not_relied_on() -> None:
    class Lies(DataLoader[Any]):
        def __len__(self) -> int:
            return 5

    samples: Any = range(7)
    assert knows_length(DataLoader(samples, 2, shuffle=True))
    assert not knows_length(Lies(samples, 2))
    assert not knows_length(DataLoader(samples, batch_sampler=[[0], [1]]))
    assert not knows_length(x for x in samples)
