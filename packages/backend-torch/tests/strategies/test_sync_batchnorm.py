"""Batch norm over two ranks is one process's batch norm over the batches of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn

from stratagem import Lite
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import DataParallelStrategy, Ranks, SingleDeviceStrategy, StepOptions
from stratagem_torch.distributed.sync_batchnorm import synchronize_batch_norm

SCRIPTS = Path(__file__).parents[1] / "scripts"

SCRIPT = (SCRIPTS / "sync_batchnorm.py").read_text()


class Results:
    """What the two ranks wrote."""

    def __init__(self, folder: Path) -> None:
        self.out = [json.loads((folder / f"out{rank}.json").read_text()) for rank in (0, 1)]
        self.weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("norm")
    (folder / "script.py").write_text(SCRIPT)
    run_file(folder / "script.py", folder=folder)
    return Results(folder)


def test_sync_batchnorm_equals_batchnorm_in_one_process(results: Results) -> None:
    for out in results.out:
        assert len(out["layers"]) == 13
        for case, distances in out["layers"].items():
            for name, distance in distances.items():
                assert distance < (1e-13 if case == "float64" else 5e-6), (case, name)


def test_a_large_mean_does_not_cost_the_variance_its_digits(results: Results) -> None:
    # Computed in one pass, the output would be wrong by 1.6e-2.
    assert all(out["large mean"]["output"] < 4e-3 for out in results.out)


def test_special_cases(results: Results) -> None:
    for out in results.out:
        assert out["half"] == "torch.bfloat16"
        assert out["torch's on the CPU"] == (
            "ConfigurationError: the model has torch.nn.SyncBatchNorm layers, whose kernels the "
            "accelerator 'cpu' does not have: pass sync_batchnorm=True, which gives them a forward "
            "that runs here too"
        )
        assert out["group of one"] is True
        assert out["one value"] == "Expected more than 1 value per channel when training"


def reference() -> dict[str, Any]:
    """Three epochs of the script's model in this process, over whole batches of 8."""
    inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
    targets = inputs.prod(1, keepdim=True)
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for part in range(0, 32, 8):
            loss = (net(inputs[part : part + 8]) - targets[part : part + 8]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {
        **{f"norm.{name}": value for name, value in norm.state_dict().items()},
        **{f"net.{name}": value for name, value in net.state_dict().items()},
    }


@pytest.mark.parametrize("way", ["trainer", "sharded", "strategy", "lite"])
def test_sync_batchnorm_run_trains_like_one_process(results: Results, way: str) -> None:
    expected = reference()
    for weights in results.weights:
        assert list(weights[way]) == list(expected)
        for name, value in weights[way].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6, msg=name)
        difference = weights["without"]["norm.running_var"] - expected["norm.running_var"]
        assert difference.abs().max() > 1e-3


# ---------------------------------------------------------------- one process


def test_sync_batchnorm_on_one_rank_changes_no_layer() -> None:
    lite = Lite(accelerator="cpu", step_options=StepOptions(sync_batchnorm=True))
    lite.launch()
    net = nn.Sequential(nn.BatchNorm1d(2))
    lite.setup(net)
    assert type(net[0]) is nn.BatchNorm1d


def test_where_torch_has_kernels_layers_become_its_own() -> None:
    net = nn.Sequential(norm := nn.BatchNorm2d(2))
    weight = norm.weight
    synchronize_batch_norm(net, has_kernels=True)
    assert type(net[0]) is nn.SyncBatchNorm
    assert net[0].weight is weight
    assert net[0].process_group is None
    assert net.eval()(torch.ones(1, 2, 3, 3)).shape == (1, 2, 3, 3)


def test_a_users_layer_keeps_its_methods_with_torchs_kernels() -> None:
    class Shifted(nn.BatchNorm1d):
        def shifted(self) -> int:
            return 1

    layer: Any = Shifted(2)
    synchronize_batch_norm(nn.Sequential(layer), has_kernels=True)
    assert type(layer).forward is nn.SyncBatchNorm.forward
    assert layer.shifted() == 1


class Own(nn.BatchNorm1d):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            Own(2),
            "sync_batchnorm=True, but 0 is a Own, whose own forward would be lost: convert it "
            "yourself, and leave sync_batchnorm out",
        ),
        (
            nn.LazyBatchNorm1d,
            "sync_batchnorm=True, but 0 is a LazyBatchNorm1d that has seen no batch yet: run the "
            "model once on a batch before, or use a layer with a number of features",
        ),
    ],
)
def test_a_layer_that_cannot_be_converted_is_refused(layer: Any, expected: str) -> None:
    made = layer() if isinstance(layer, type) else layer
    with pytest.raises(UserCodeError) as caught:
        synchronize_batch_norm(nn.Sequential(made), has_kernels=False)
    assert str(caught.value) == expected


def test_a_strategy_that_has_no_way_says_so() -> None:
    class Several(SingleDeviceStrategy):
        ranks = Ranks(world_size=2)

    with pytest.raises(ConfigurationError) as caught:
        Several().synchronize_batch_norm(nn.BatchNorm1d(2))
    assert str(caught.value) == (
        "sync_batchnorm=True: Several has no way to take batch statistics over all ranks; leave it "
        "out, or use strategy='ddp'"
    )


def test_dp_refuses_sync_batchnorm() -> None:
    with pytest.warns(FutureWarning):
        strategy = DataParallelStrategy()
    strategy.components = type("Components", (), {"devices": (0, 1)})()
    with pytest.raises(ConfigurationError, match="takes batch statistics on each device alone"):
        strategy.synchronize_batch_norm(nn.BatchNorm1d(2))
