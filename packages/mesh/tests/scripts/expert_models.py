"""Models with experts, and the batches and losses of their tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, softmax

WORDS = 40
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}


class Experts(nn.Module):
    """Experts that are written by hand, with a bias and a norm that all experts share."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.n_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, 12) / 3)
        self.up_bias = nn.Parameter(torch.randn(experts, 12) / 3)
        self.down = nn.Parameter(torch.randn(experts, 12, width) / 3)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.n_experts):
            token, place = (experts == expert).nonzero(as_tuple=True)
            hidden = gelu(x[token] @ self.up[expert] + self.up_bias[expert])
            own = self.norm(hidden @ self.down[expert]) * weights[token, place, None]
            result = result.index_add(0, token, own.to(x.dtype))
        return result


class Layer(nn.Module):
    def __init__(self, experts: int = 4, width: int = 8, each: int = 2) -> None:
        super().__init__()
        self.each = each
        self.router = nn.Linear(width, experts)
        self.experts = Experts(experts, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = softmax(self.route(tokens), -1).topk(self.each, -1)
        return x + self.experts(tokens, chosen, weights).view_as(x)

    def route(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.router(tokens)
        return scores


class Written(nn.Module):
    """A model that knows nothing of meshes."""

    layer: type[Layer] = Layer

    def __init__(self, experts: int = 4, each: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList([self.layer(experts, each=each) for _ in range(2)])
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class ToOne(Layer):
    """All tokens choose the first expert, so that others have none."""

    def route(self, tokens: Tensor) -> Tensor:
        scores = super().route(tokens)
        return scores - 50 * (torch.arange(scores.shape[-1]) > 0)


class Unbalanced(Written):
    layer = ToOne

    def __init__(self) -> None:
        super().__init__(each=1)


class Few(Written):
    """Two experts, which two ranks divide, and two share."""

    def __init__(self) -> None:
        super().__init__(experts=2)


def mixtral(**options: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    keys = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, **options}
    return MixtralForCausalLM(MixtralConfig(**keys))


def qwen3() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=3, head_dim=4
    )
    return Qwen3MoeForCausalLM(config)


def eager(build: Callable[[], Any]) -> Any:
    """Return a model that computes its experts in a loop, also in float64."""
    model = build()
    model.set_experts_implementation("eager")
    return model


def mixtral_eager() -> Any:
    return eager(mixtral)


def mixtral_of_parts() -> Any:
    """Return a model whose outputs the context axis can join."""
    return eager(partial(mixtral, output_router_logits=False))


def mixtral_grouped() -> Any:
    """Return a model that computes its experts by `torch._grouped_mm`, and no loss of its router.

    The stages of a pipeline do not return what a router gives to a loss.
    """
    return mixtral(output_router_logits=False)


def qwen3_eager() -> Any:
    return eager(qwen3)


def batch(index: int) -> Tensor:
    return torch.randint(1, WORDS, (2, 12), generator=torch.Generator().manual_seed(index))


def loss(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of the next word."""
    if not hasattr(getattr(model, "module", model), "layers"):
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found
    return cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
