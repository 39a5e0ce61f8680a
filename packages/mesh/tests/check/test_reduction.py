"""Reducing models to a few layers of each kind, and values that are drawn anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.check.reduction import (
    Draws,
    DrawsOfRanks,
    former_name,
    give_values,
    reduce_layers,
    without_values,
)


class Block(nn.Module):
    def __init__(self, index: int, *, width: int = 16, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx, self.window, self.drop_path = index, window, index / 10
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU())


class Config:
    def __init__(self, count: int) -> None:
        self.num_hidden_layers = count
        self.num_heads = count
        self.layer_types = ["sliding" if index % 2 else "full" for index in range(count)]


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.n_layers = config, config.num_hidden_layers
        windows = [4 if index % 2 else None for index in range(self.n_layers)]
        self.layers = nn.ModuleList(
            Block(i, window=window, width=16 if i < 5 else 8) for i, window in enumerate(windows)
        )
        self.experts = nn.ModuleList(Block(0) for _ in range(4))
        self.register_buffer("frequencies", torch.arange(4.0))


def test_modules_of_each_kind_stay_in_their_order() -> None:
    config = Config(8)
    model: Any = Model(config)
    kept = reduce_layers(model, 1)
    # By a window, and by the width of the last three.
    assert kept == {"layers": [0, 1, 5, 6]}
    assert [block.window for block in model.layers] == [None, 4, 4, None]
    assert [block.layer_idx for block in model.layers] == [0, 1, 2, 3]
    assert [name for name, _ in model.layers.named_children()] == ["0", "1", "2", "3"]
    assert len(model.experts) == 4
    assert all(len(block.net) == 4 for block in model.layers)
    assert former_name("layers.2.net.0", kept) == "layers.5.net.0"
    assert former_name("experts.2", kept) == "experts.2"


def test_numbers_of_layers_follow_in_a_copy_of_the_config() -> None:
    config = Config(8)
    model: Any = Model(config)
    reduce_layers(model, 1)
    assert model.n_layers == model.config.num_hidden_layers == 4
    assert model.config.layer_types == ["full", "sliding", "sliding", "full"]
    assert model.config.num_heads == 8
    assert config.num_hidden_layers == len(config.layer_types) == 8


def test_a_model_with_few_layers_stays_as_it_is() -> None:
    assert reduce_layers(Model(Config(3)), 2) == {}


def test_a_model_is_built_without_values_of_parameters() -> None:
    register = nn.Module.register_parameter
    with without_values():
        model: Any = Model(Config(2))
        tied = nn.Linear(2, 2)
        tied.weight = shared = nn.Parameter(torch.ones(2, 2))
        other = nn.Linear(2, 2)
        other.weight = shared
    assert nn.Module.register_parameter is register
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.frequencies.tolist() == [0, 1, 2, 3]
    assert tied.weight is other.weight
    both = nn.ModuleList([tied, other])
    give_values(both, Draws())
    assert tied.weight is other.weight
    assert tied.weight.dtype is torch.float64
    assert not tied.weight.is_meta


def test_values_are_small_and_norms_are_near_to_one() -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.LayerNorm(300)).requires_grad_(False)
    give_values(model, Draws())
    linear, norm = model
    assert isinstance(linear, nn.Linear)
    assert linear.weight.abs().max() <= 400**-0.5
    assert linear.weight.std() > 0.02
    assert linear.bias.abs().max() <= 0.02
    assert 0 < (norm.get_parameter("weight") - 1).abs().max() <= 0.02
    assert not linear.weight.requires_grad


def test_ranks_that_draw_a_part_each_have_the_values_of_one_process(tmp_path: Path) -> None:
    expected, model = (nn.Embedding(3 * 2**19 + 7, 2) for _ in range(2))
    give_values(expected, Draws())
    for rank in range(2):  # the second one completes the file
        give_values(model, DrawsOfRanks(tmp_path, rank, 2, lambda: None))
    assert torch.equal(model.weight, expected.weight)


def test_an_rnn_computes_with_its_new_values() -> None:
    with without_values():
        rnn = nn.LSTM(3, 4)
    give_values(rnn, Draws())
    output, _ = rnn(torch.ones(2, 1, 3, dtype=torch.float64))
    assert output.abs().max() > 0


def test_a_buffer_without_values_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)
            self.register_buffer("scale", self.net.weight.detach().max())

    with without_values():
        model = Scaled()
    with pytest.raises(ConfigurationError) as raised:
        give_values(model, Draws())
    assert str(raised.value) == (
        "the buffer 'scale' has no values: it is on the meta device, or computed from parameters, "
        "which have no values while a model of few layers is built. Compare a small model with all "
        "of its layers"
    )
