"""Tensor times data parallelism in two and four real processes, and hybrid sharding in four."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.errors import ConfigurationError
from stratagem.strategies import ModelParallelStrategy

HERE = Path(__file__).parents[1]

Ranks = list[dict[str, Any]]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = load(HERE / "fsdp_models.py")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    runs, module = models.train("single_device")
    runs.save_checkpoint(folder / "single_device.ckpt")
    resumed = models.Net()
    models.trainer("single_device", 1, max_steps=25).fit(
        resumed, models.loader(1), ckpt_path=folder / "single_device.ckpt"
    )
    return {"folder": folder, "losses": list(module.losses), "resumed": resumed.losses}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest,
    reference: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Ranks:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    (folder / "single_device.ckpt").symlink_to(reference["folder"] / "single_device.ckpt")
    # The time is for a hang: four ranks take 60 s of CPU, whatever else runs.
    script = HERE / "model_parallel_script.py"
    run_file(script, str(request.param), folder=folder, timeout=500)
    written = [json.loads(file.read_text()) for file in sorted(folder.glob("out*.json"))]
    for rank in written:
        rank["folder"] = folder
    return written


def close(values: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    return torch.allclose(torch.tensor(values), torch.tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("way", ["function", "groups", "own groups", "configure_model"])
def test_losses_equal_one_process(way: str, ranks: Ranks, reference: dict[str, Any]) -> None:
    assert close(ranks[0]["losses"][way], reference["losses"])


@pytest.mark.parametrize("way", ["function", "groups", "own groups"])
def test_parameters_are_spread_over_all_ranks(way: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert rank[f"{way} part"] == 1 / len(ranks)


@pytest.mark.parametrize("way", ["function", "groups", "own groups"])
def test_checkpoints_go_to_and_from_one_device(
    way: str, ranks: Ranks, reference: dict[str, Any]
) -> None:
    assert close(ranks[0]["losses"][f"{way} resumed"], reference["resumed"], 1e-6)
    resumed = models.Net(seed=5)
    models.trainer("single_device", 1, max_steps=25).fit(
        resumed, models.loader(1), ckpt_path=ranks[0]["folder"] / f"{way}.ckpt"
    )
    assert close(resumed.losses, reference["resumed"], 1e-6)


def test_tensor_parallel_ranks_share_a_part_of_the_data(ranks: Ranks) -> None:
    groups = len(ranks) // 2
    assert [rank["data_split"] for rank in ranks] == [
        [index // 2, groups] for index in range(len(ranks))
    ]


def test_sums_count_a_part_of_the_data_once(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["logged"]["samples"] == 64.0
        assert rank["logged"]["at once"] == 8.0


def test_lite_init_module_trains_like_a_plain_loop(ranks: Ranks) -> None:
    net = models.Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for x, y in models.loader(1):
        loss = mse_loss(net(x), y)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert close(ranks[0]["losses"]["lite"], expected)


def test_model_parallel_shards_keep_the_initial_values(ranks: Ranks) -> None:
    assert ranks[0]["differ"] == []
    assert ranks[0]["names"] == [
        f"{layer}.{name}"
        for layer in (0, 1)
        for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]


def test_model_parallel_refuses_bad_input_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["messages"]["another"].startswith(
            "UserCodeError: parallelize_fn returned another Identity than the model that it was "
            "given: expected it to change the model in place"
        )
        assert rank["messages"]["meta"].startswith(
            "UserCodeError: the module '0.up' was divided between ranks on the meta device, where "
            "its parameters have no values to divide"
        )
        place = " (data 0)" if len(ranks) == 4 else ""
        assert rank["messages"]["batches"].startswith(
            f"UserCodeError: ranks 0, 1{place} read different batches; they share a model, so "
            "expected the same batch on each"
        )
        for name in ("order", "of a loop", "other shapes"):
            assert rank["messages"][name].startswith(
                f"UserCodeError: ranks 0, 1{place} read different batches"
            )
        assert rank["messages"]["empty"].startswith(
            "ConfigurationError: the parameter 'net.blocks.0.empty' has no elements (shape (0, 3)),"
            " and fully_shard cannot reduce its gradient: pass it in ignored_params"
        )
        assert rank["messages"]["nothing"].startswith(
            "ConfigurationError: tensor_parallel_size=2, but no layer is divided, so that 2 ranks "
            "would each do all the work: pass parallelize_fn"
        )


@pytest.mark.parametrize("way", ["hybrid", "reshard 2"])
def test_four_ranks_in_two_groups_have_the_numbers_of_one_process(
    way: str, ranks: Ranks, reference: dict[str, Any]
) -> None:
    if len(ranks) < 4:
        assert way not in ranks[0]["losses"]
        return
    assert close(ranks[0]["losses"][way], reference["losses"])


def test_hybrid_sharding_has_two_copies_of_the_shards(ranks: Ranks) -> None:
    if len(ranks) < 4:
        return
    whole = sum(p.numel() for p in models.Net().parameters() if p.ndim)
    parts = [rank["hybrid part"] for rank in ranks]
    assert parts[:2] == parts[2:]
    assert sum(parts) == 2 * whole


# ---------------------------------------------------------------- before processes start


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2},
            2,
            "data_parallel_size=2 and tensor_parallel_size=2 are for 2 x 2 = 4 ranks, received 2 "
            "(2 device(s), 1 node(s)): expected sizes whose product is the number of ranks",
        ),
        (
            {"tensor_parallel_size": 3},
            4,
            "data_parallel_size='auto' and tensor_parallel_size=3 are for 1 x 3 = 3 ranks",
        ),
        ({"data_parallel_size": 3}, 2, "are for 3 x 1 = 3 ranks, received 2"),
        (
            {"tensor_parallel_size": 0},
            2,
            "tensor_parallel_size=0: expected a number of ranks of at least 1, or 'auto'",
        ),
        ({"data_parallel_size": "all"}, 2, "data_parallel_size='all': expected a number of ranks"),
        ({"parallelize_fn": "tp"}, 2, "parallelize_fn='tp': expected a function"),
        ({"auto_wrap_policy": "x"}, 2, "auto_wrap_policy='x': expected a class of modules"),
    ],
)
def test_a_wrong_mesh_is_refused(options: dict[str, Any], devices: int, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Lite("cpu", strategy=ModelParallelStrategy(**options), devices=devices)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 4)),
        ({"tensor_parallel_size": 2}, (2, 2)),
        ({"data_parallel_size": 4}, (4, 1)),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, (2, 2)),
    ],
)
def test_sizes_that_are_left_open_follow_from_the_others(
    options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    strategy = Lite("cpu", strategy=ModelParallelStrategy(**options), devices=4).strategy
    assert isinstance(strategy, ModelParallelStrategy)
    assert strategy.mesh_shape()[0] == sizes


def test_model_parallel_is_selected_by_name() -> None:
    assert isinstance(Lite("cpu", strategy="model_parallel").strategy, ModelParallelStrategy)


def test_ranks_that_share_a_model_draw_the_same_numbers(ranks: Ranks) -> None:
    """Of Python and NumPy, without a seed; other parts of the data draw others."""
    drawn = [tuple(rank["drawn"]) for rank in ranks]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(ranks) // 2
