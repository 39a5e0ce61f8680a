"""Small models whose layers are divided in different ways, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

TOKENS = torch.arange(24).reshape(2, 12) % 16


class Attention(nn.Module):
    """Causal attention with 4 heads of 4 features."""

    def __init__(self, *, fused: bool = False, eager: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.width = 4, 4, 16
        self.fused, self.eager = fused, eager
        if fused:
            self.qkv = nn.Linear(16, 48)
        else:
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        parts = (
            self.qkv(x).split(self.width, 2) if self.fused else [self.q(x), self.k(x), self.v(x)]
        )
        shape = count, length, self.num_heads, self.head_dim
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        q, k = self.norm(q), self.norm(k)
        if self.eager:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
            y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Feed(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))  # type: ignore[no-any-return]


class Packed(nn.Module):
    """Queries, keys and values of one layer, by a view with five dimensions; two packed gates."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.gates, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self.qkv(x).view(count, length, 3, -1, 4).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        gate, up = self.gates(x + self.out(y)).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up)  # type: ignore[no-any-return]


class Language(nn.Module):
    """An embedding that is tied to the last layer, around a block."""

    def __init__(self, *, tied: bool = True, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16, padding_idx=1)
        self.attention = Attention(**options)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.down(gelu(self.up(self.norm(x))))
        return self.head(x)  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    first = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8)]
    return nn.Sequential(*first, nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def repeated() -> nn.Module:
    """Return a model whose layers have two names each."""
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    return nn.Sequential(up, nn.ReLU(), down, up, nn.ReLU(), down)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Returned(nn.Module):
    """Divided features that another operation than a layer reads, so that layers stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden) + hidden.mean(-1, keepdim=True) + self.seen(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A trained scale, and one that is computed from the input, meet divided features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gated, self.back, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).relu()) + x * self.scale
        return self.back(self.gated(x) * self.gate(x).sigmoid())  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A linear layer with LoRA, whose parts have the names of PEFT."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        size = base.out_features, base.in_features
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size[1], 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, size[0], bias=False)})
        kept = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_dropout = nn.ModuleDict({"default": kept})
        self.lora_variant: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        reduced = self.lora_A["default"](self.lora_dropout["default"](x))
        added: Tensor = self.lora_B["default"](reduced)
        return y + 0.5 * added


def adapted() -> nn.Sequential:
    up, down = Adapted(nn.Linear(8, 16)), Adapted(nn.Linear(16, 8))
    return nn.Sequential(up, nn.ReLU(), down, Adapted(nn.Linear(8, 8)))


class Experts(nn.Module):
    """Brings a plan with styles that the mesh does not know, of parameters and modules."""

    _tp_plan: ClassVar = {
        **{"feed.up": "colwise", "feed.down": "rowwise", "experts.*": "moe_tp_experts"},
        **{"outs.weights": "packed_colwise", "outs.0": "colwise", "missing.layer": "colwise"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.outs = nn.Sequential(nn.Linear(16, 16))
        self.outs.weights = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.feed(x)
        chosen = sum(expert(x) for expert in self.experts)
        return self.outs(chosen) * self.outs.weights  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, its input, and a plan if it has one."""

    build: Callable[[], nn.Module]
    example: Tensor
    plan: dict[str, str] | None = None


SEQUENCE = torch.linspace(-1, 1, 192, dtype=torch.float64).reshape(2, 6, 16).sin()
ROWS = torch.linspace(-2, 2, 32, dtype=torch.float64).reshape(4, 8).sin()
TIED = {"embedding": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
CASES = {
    "sequential": Case(sequential, ROWS),
    "encoder": Case(encoder, SEQUENCE),
    "separate": Case(partial(Language, norm=True), TOKENS),
    "eager": Case(partial(Language, eager=True, norm=True), TOKENS),
    "fused": Case(partial(Language, fused=True, tied=False), TOKENS),
    "packed": Case(Packed, SEQUENCE),
    "returned": Case(lambda: nn.Sequential(Returned(), nn.Linear(8, 16), nn.Linear(16, 8)), ROWS),
    "scaled": Case(Scaled, ROWS),
    "tied": Case(Language, TOKENS, TIED),
    "gathered": Case(
        sequential,
        ROWS,
        {"0": "colwise_gather_output", "2": "rowwise", "4": "colwise", "6": "rowwise"},
    ),
    "repeated": Case(
        repeated, ROWS, {"0": "colwise", "2": "rowwise", "3": "colwise", "5": "rowwise"}
    ),
    "found with adapters": Case(adapted, ROWS),
    "experts": Case(Experts, SEQUENCE),
    "adapted": Case(adapted, ROWS, {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output"}),
}
