"""Groups of an optimizer by patterns of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_extras.parameter_groups import parameter_groups

SCRIPT = Path(__file__).parent / "scripts" / "parameter_groups_fsdp.py"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.LayerNorm(2)


def by_name(groups: list[dict[str, Any]], option: str) -> dict[str, Any]:
    return {name: group.get(option) for group in groups for name in group["names"]}


def test_the_later_pattern_decides_and_each_parameter_is_in_one_group() -> None:
    model = Model()
    model.words.requires_grad_(False)
    rules = {
        "*": {"weight_decay": 0.1},
        "*.bias": {"weight_decay": 0.0},
        "layers.2.bias": {"lr": 3.0},
    }
    groups = parameter_groups(model, rules, lr=1.0)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    decays, rates = by_name(groups, "weight_decay"), by_name(groups, "lr")
    assert decays["layers.0.weight"] == 0.1
    assert decays["layers.0.bias"] == decays["norm.bias"] == 0.0
    assert (rates["layers.2.bias"], rates["layers.1.bias"]) == (3.0, 1.0)
    assert all(
        p is dict(model.named_parameters())[n]
        for group in groups
        for n, p in zip(group["names"], group["params"], strict=True)
    )
    torch.optim.AdamW(groups)


def test_learning_rates_decay_towards_the_first_layer() -> None:
    rates = by_name(parameter_groups(Model(), {}, lr=1.0, layer_decay=0.5), "lr")
    assert rates["words.weight"] == 0.125
    assert [rates[f"layers.{index}.weight"] for index in range(3)] == [0.25, 0.5, 1.0]
    assert rates["norm.weight"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": {"*.gain": {}}}, r"'\*\.gain' matches no trained parameter of Model: expected"),
        ({"layer_decay": 0.5}, "layer_decay=0.5 without a learning rate: pass lr="),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parameter_groups(Model(), **{"rules": {}, **options})


def test_a_decay_without_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"layer_decay=0\.5: no name has a number"):
        parameter_groups(nn.Linear(2, 2), {}, lr=1.0, layer_decay=0.5)


def test_a_strategy_that_shards_trains_the_groups(tmp_path: Path) -> None:
    """The weights of two ranks of fsdp are those of a loop."""
    run_file(SCRIPT, "out.pt", folder=tmp_path)
    expected = torch.load(tmp_path / "loop.pt", weights_only=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight)
