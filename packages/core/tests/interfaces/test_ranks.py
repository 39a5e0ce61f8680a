"""Ranks that are arranged along the axes of a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.errors import ConfigurationError
from stratagem.strategies import Axis, Ranks

DATA, TENSOR = Axis("data", 2), Axis("tensor", 2, batches="same")
CONTEXT = Axis("context", 2, batches="parts")
STAGES = Axis("stage", 2, batches="same", parameters="divided")


@pytest.mark.parametrize(
    ("axes", "data", "values", "replicas"),
    [
        ([DATA, TENSOR], [(0, 1), (2, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)]),
        ([TENSOR, DATA], [(0, 2), (1, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]),
        ([DATA, CONTEXT], [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]),
        ([CONTEXT, TENSOR], [(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)]),
        ([STAGES, DATA], [(0, 2), (1, 3)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]),
        ([DATA, DATA], [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]),
    ],
)
def test_axes_decide_which_ranks_read_compute_and_hold_the_same(
    axes: list[Axis],
    data: list[tuple[int, ...]],
    values: list[tuple[int, ...]],
    replicas: list[tuple[int, ...]],
) -> None:
    for rank in range(4):
        ranks = Ranks(global_rank=rank, world_size=4, axes=axes)
        assert [*ranks.data_groups] == data
        assert [*ranks.value_groups] == values
        assert [*ranks.replica_groups] == replicas
        assert rank in ranks.data_groups[ranks.data_split[0]]
        assert ranks.value_copies == len(values[0])


def test_without_axes_data_splits_decide() -> None:
    ranks = Ranks(world_size=3, data_splits=[(0, 2), (1, 2), (0, 2)])
    assert ranks.axes == ()
    assert ranks.value_groups == ranks.data_groups == ((0, 2), (1,))
    assert ranks.replica_groups == ((0, 1, 2),)
    assert (ranks.coordinates(2), ranks.place([2])) == ((2,), "")


def test_data_splits_override_the_axes() -> None:
    splits = [(0, 1)] * 4
    ranks = Ranks(world_size=4, axes=[DATA, CONTEXT], data_splits=splits)
    assert ranks.data_groups == ((0, 1, 2, 3),)
    assert ranks.value_groups == ((0, 2), (1, 3))


def test_place_has_the_coordinates_that_ranks_share() -> None:
    ranks = Ranks(world_size=8, axes=[DATA, Axis("alone", 1), CONTEXT, TENSOR])
    assert ranks.coordinates(6) == (1, 0, 1, 0)
    assert ranks.place([6]) == "data 1, context 1, tensor 0"
    assert ranks.place([4, 6]) == "data 1, tensor 0"
    assert ranks.place([0, 7]) == ""
    assert Ranks(world_size=2, axes=[DATA, Axis("tensor", 1)]).place([1]) == ""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: Ranks(world_size=8, axes=[DATA, TENSOR]),
            "the axes data 2 x tensor 2 are for 4 rank(s), received 8: expected sizes whose "
            "product is the number of ranks",
        ),
        (
            lambda: Axis("data", 0),
            "size=0, batches='own', parameters='same', descends=False): expected a size of",
        ),
        (lambda: Axis("data", True), "expected a size of at least 1"),
        (lambda: Axis("data", 2, batches="all"), "expected batches='own', 'same' or 'parts'"),  # type: ignore[arg-type]
        (lambda: Axis("data", 2, parameters="own"), "expected parameters='same' or 'divided'"),  # type: ignore[arg-type]
    ],
)
def test_axes_that_do_not_fit_are_refused(make: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("along", "groups"),
    [
        (None, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ([], [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (["data"], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (["tensor"], [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (["tensor", "data"], [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (["data", "context", "tensor"], [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
    ],
)
def test_seed_differs_along_the_named_axes_alone(
    along: list[str] | None, groups: list[tuple[int, ...]]
) -> None:
    """By default ranks that compute the same values have the same seed."""
    axes = [DATA, CONTEXT, TENSOR]
    of_seed: dict[int, list[int]] = {}
    for rank in range(8):
        ranks = Ranks(global_rank=rank, world_size=8, axes=axes)
        seed = ranks.seed(2**32 - 1, differs_along=along)
        assert 0 <= seed < 2**32
        of_seed.setdefault(seed, []).append(rank)
    assert sorted(map(tuple, of_seed.values())) == groups
    assert of_seed[2**32 - 1][0] == 0


def test_seed_without_axes_differs_by_the_part_of_the_data() -> None:
    splits = [(0, 2), (1, 2), (0, 2), (1, 2)]
    seeds = [Ranks(global_rank=r, world_size=4, data_splits=splits).seed(3) for r in range(4)]
    assert seeds == [3, 1_000_006, 3, 1_000_006]
    assert Ranks().seed(3) == 3


def test_seed_refuses_a_name_without_an_axis() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Ranks(world_size=4, axes=[DATA, TENSOR]).seed(1, differs_along=["data", "stage"])
    assert str(caught.value) == (
        "seed(differs_along=['data', 'stage']): there is no axis 'stage'; expected some of data, "
        "tensor"
    )
