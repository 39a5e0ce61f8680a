"""The search for random numbers in the forward pass of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem_mesh.tensor.region import draws_numbers


class Literal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.1, self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.with_noise(x)

    def with_noise(self, x: Tensor) -> Tensor:
        return x + torch.stack([torch.randn_like(row) for row in x])


class Probability(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropout = probability
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (Literal(), True),
        (Noise(), True),
        (Probability(0.1), True),
        (Probability(0.0), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1), True),
        (nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0), False),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU()), False),
    ],
)
def test_random_numbers_are_found_by_attributes_and_code(model: nn.Module, draws: bool) -> None:
    assert draws_numbers(nn.ModuleList([model])) is draws
