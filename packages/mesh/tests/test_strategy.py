"""MeshStrategy: sizes, axes and options."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from torch import nn

from stratagem import Trainer
from stratagem.errors import ConfigurationError
from stratagem.strategies import PreparedModel
from stratagem_mesh import MeshStrategy


def trainer(devices: int, **options: Any) -> Trainer:
    strategy = MeshStrategy(**options)
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


def test_sizes_multiply_to_the_number_of_ranks() -> None:
    strategy: Any = trainer(8, tensor=2, context=2).strategy
    assert strategy.sizes == (1, 1, 2, 2, 2)
    assert strategy.mesh_shape() == ((1, 4, 2), ("replicate", "shard", "tensor_parallel"))
    assert strategy.ranks.data_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert strategy.ranks.place([7]) == "shard 1, context 1, tensor 1"


def test_candidates_factor_the_devices_of_a_node() -> None:
    assert MeshStrategy.candidates(1, 1) == [{}]
    assert MeshStrategy.candidates(4, 1) == [
        {},
        {"tensor": 2},
        {"context": 2},
        {"tensor": 4},
        {"context": 4},
        {"tensor": 2, "context": 2},
    ]
    assert {"tensor": 3, "context": 2} in MeshStrategy.candidates(6, 1)
    assert MeshStrategy.candidates(2, 3)[:3] == [{}, {"tensor": 2}, {"context": 2}]
    assert {"tensor": 2, "replicate": 3} in MeshStrategy.candidates(2, 3)
    assert len(MeshStrategy.candidates(64, 16)) == 12


@pytest.mark.parametrize("devices", [1, 2, 6, 8])
def test_candidates_are_sizes_of_a_mesh(devices: int) -> None:
    for sizes in MeshStrategy.candidates(devices, 1):
        strategy: Any = trainer(devices, **sizes).strategy
        assert strategy.sizes == (
            1,
            sizes.get("replicate", 1),
            devices // prod(sizes.values()),
            sizes.get("context", 1),
            sizes.get("tensor", 1),
        )


def test_the_name_mesh_shards_over_all_ranks() -> None:
    strategy: Any = Trainer(accelerator="cpu", devices=4, strategy="mesh", logger=False).strategy
    assert strategy.sizes == (1, 1, 4, 1, 1)


def test_sizes_with_another_product_are_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        trainer(4, tensor=3)
    assert str(raised.value).startswith(
        "MeshStrategy(replicate=1, shard='auto', context=1, tensor=3) is for 1 x 1 x 1 x 3 = 3 "
        "rank(s), received 4 (4 device(s), 1 node(s)): expected sizes whose product is the number "
        "of ranks"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"data_parallel_size": 2},
            "MeshStrategy(data_parallel_size=2) is an argument of ModelParallelStrategy: write "
            "shard=, the number of ranks that read different batches",
        ),
        ({"tensor_parallel_size": 2}, "write tensor=, the number of ranks that share a layer"),
        ({"parallelize_fn": print}, "write tensor_plan=, which is called as tensor_plan(model, "),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes': expected True or False"),
        ({"loss_parallel": "no"}, "loss_parallel='no': expected True or False"),
        ({"check": 1}, "check=1: expected True or False"),
        ({"example_input": "abc"}, "example_input='abc': expected a tensor, a tuple of arguments"),
        ({"context_modules": "encoder"}, "context_modules='encoder': expected a list of names of "),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no': expected True, False, None"),
    ],
)
def test_an_argument_of_another_form_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MeshStrategy(**given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline": 0}, "pipeline=0: expected a number of ranks of at least 1"),
        ({"schedule": "zb"}, """schedule='zb': expected "gpipe", "1f1b" or "interleaved", as a"""),
        (
            {"schedule": "gpipe", "virtual_stages": 2},
            """schedule="gpipe" with virtual_stages=2: expected one stage on each rank. Write """,
        ),
        (
            {"schedule": "interleaved"},
            """schedule="interleaved" with virtual_stages=1: expected several stages on each""",
        ),
        (
            {"pipeline_cuts": "blocks.1"},
            "pipeline_cuts='blocks.1': expected a list of names of modules, such as ['layers.6']",
        ),
        (
            {"pipeline_cuts": ["blocks.1"], "virtual_stages": 2},
            "pipeline_cuts=['blocks.1']: expected 3 different name(s), those of the first modules "
            "of all of 4 stages (pipeline=2 x virtual_stages=2) but the first",
        ),
        ({"pipeline_cuts": ["a", "a"], "pipeline": 3}, "expected 2 different name(s)"),
        (
            {"check": True},
            "check=True with pipeline=2: a stage has not all layers, to compare a copy of the model"
            " with one process: expected check=False. `stratagem mesh check --pipeline 2` compares",
        ),
        (
            {"pipeline": 1, "pipeline_cuts": ["a"]},
            "pipeline_cuts, virtual_stages and schedule belong to a pipeline, and pipeline=1: pass "
            "pipeline=2 or more, or leave them out",
        ),
    ],
)
def test_options_of_a_pipeline_are_refused_when_the_strategy_is_made(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MeshStrategy(**{"pipeline": 2, **given})
    assert message in str(raised.value)


def test_rank_zero_of_a_pipeline_has_the_last_stage() -> None:
    strategy: Any = trainer(8, pipeline=2, tensor=2).strategy
    assert strategy.sizes == (2, 1, 2, 1, 2)
    assert strategy.ranks.place([0]) == "pipeline 1, shard 0, tensor 0"
    assert strategy.ranks.place([7]) == "pipeline 0, shard 1, tensor 1"
    assert strategy.ranks.data_groups == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_an_error_of_sizes_names_the_plan() -> None:
    strategy = MeshStrategy(tensor=2, tensor_plan={"up": "colwise", "down": "rowwise"})
    strategy.tensor_layers = {"up": "colwise", "down": "rowwise"}
    prepared = PreparedModel(nn.Identity(), nn.Identity(), [], nn.Identity())
    error = RuntimeError("running_mean should contain 8 elements not 16")
    assert str(strategy.explain(prepared, error)) == (
        "running_mean should contain 8 elements not 16. The tensor_plan divides 'up', 'down': "
        "between a colwise layer and its rowwise one a rank has 1/2 of the features, and something "
        "there expects all of them. Leave both layers out of the plan, or divide what lies between "
        "them too"
    )
    assert strategy.explain(prepared, RuntimeError("out of memory")) is None


@pytest.mark.parametrize("size", [0, True, 1.5, "2"])
def test_a_size_that_is_no_number_of_ranks_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MeshStrategy(context=size)
    assert str(raised.value) == f"context={size!r}: expected a number of ranks of at least 1"
    with pytest.raises(ConfigurationError) as raised:
        MeshStrategy(shard=size)
    assert str(raised.value).endswith(
        f"shard={size!r}: expected a number of ranks of at least 1, or 'auto'"
    )


def test_a_tensor_axis_over_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "NODE_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as raised:
        Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            strategy=MeshStrategy(tensor=2),
            logger=False,
        )
    assert (
        "tensor=2: ranks that share a layer communicate in each layer, so they belong on one node, "
        "received 1 device(s) on each: expected a size that divides them"
    ) in str(raised.value)
