"""Models that attend over a sequence, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WORDS = 30


class Encoder(nn.Module):
    """An `nn.TransformerEncoder` between layers that read the whole sequence."""

    def __init__(
        self,
        *,
        heads: int = 4,
        batch_first: bool = True,
        causal: bool = False,
        dropout: float = 0,
        layers: int = 2,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 4 * heads
        layer = nn.TransformerEncoderLayer(width, heads, 16, dropout, batch_first=batch_first)
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(64, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():  # the layers are copies of one
            nn.init.normal_(parameter, std=0.3)
        self.head = nn.Linear(width, WORDS)
        self.causal = causal
        self.batch_first = batch_first

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        hidden = self.words(ids) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=hidden.dtype)
        options: dict[str, Any] = {"mask": mask, "is_causal": True} if self.causal else {}
        if padding is not None:
            options["src_key_padding_mask"] = padding
            options.pop("is_causal", None)
            if self.causal:
                options["mask"] = mask < 0
        if not self.batch_first:
            hidden = hidden.transpose(0, 1)
        hidden = self.encoder(hidden, **options)
        if not self.batch_first:
            hidden = hidden.transpose(0, 1)
        output: Tensor = self.head(hidden)
        return output


class Attention(nn.Module):
    """Causal attention with fewer heads for keys."""

    def __init__(self, width: int, heads: int, key_heads: int, way: str) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * key_heads * (width // heads))
        self.heads, self.key_heads, self.way = heads, key_heads, way
        self.bias = nn.Parameter(torch.zeros(1)) if way == "bias" else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, length, 2, self.key_heads, -1)
        key, value = keys[:, :, 0].transpose(1, 2), keys[:, :, 1].transpose(1, 2)
        if self.way == "window":
            mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-2)
        elif self.way == "own mask":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        elif self.bias is not None:
            mask = self.bias.expand(length, length)
        elif mask is not None and mask.shape[0] == batch:
            mask = mask[:, None, None]
        if self.way == "half":
            key, value = key[:, :, ::2], value[:, :, ::2]
        attended = scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.way == "causal", enable_gqa=True
        )
        output: Tensor = x + attended.transpose(1, 2).reshape(batch, length, width)
        return output.cumsum(1) if self.way == "cumsum" else output


class Body(nn.Module):
    """Two layers of attention, and a bias for each entry of the batch."""

    def __init__(self, key_heads: int, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(16, 4, key_heads, way) for _ in range(2))
        self.way = way

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        if bias is not None:
            x = torch.tanh(x + bias[:, None].mean(-1, keepdim=True))
        return x.mean(1) if self.way == "mean" else x


class Model(nn.Module):
    """A body that is named as a region."""

    def __init__(self, *, key_heads: int = 2, way: str = "causal") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        self.bias = nn.Linear(16, 5)
        self.body = Body(key_heads, way)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.words(ids)
        output: Tensor = self.head(self.body(hidden, mask, bias=self.bias(hidden[:, 0])))
        return output


class Wrapped(nn.Module):
    """Recomputes each layer in the backward pass; reads two batches before it."""

    def __init__(self, model: nn.Module, *, masks: bool = False) -> None:
        super().__init__()
        self.model = model
        region: Any = model.encoder if isinstance(model, Encoder) else model.body
        layers = region.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
        self.masks = masks

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        output: Tensor
        if self.masks:
            padding = torch.zeros(ids.shape, dtype=torch.bool)
            padding[:, -3:] = True
            output = self.model(ids) + self.model(ids, padding)
            return output
        short = self.model(ids[:, :-4])
        output = (self.model(ids) if mask is None else self.model(ids, mask)) + short.mean()
        return output


def batch(length: int) -> Tensor:
    return torch.randint(0, WORDS, (3, length), generator=torch.Generator().manual_seed(1))


def padding(length: int) -> Tensor:
    mask = torch.zeros(3, length, dtype=torch.bool)
    mask[0, -5:] = mask[1, -1:] = True
    return mask


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    logits = model(*inputs)
    labels = inputs[0] if logits.ndim == 3 else inputs[0][:, 0]
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...], list[str] | None]

BODY = ["body"]
CASES: dict[str, Case] = {
    "encoder": (Encoder, (batch(16),), None),
    "causal": (partial(Encoder, causal=True), (batch(16),), None),
    "padding": (Encoder, (batch(16), padding(16)), None),
    "causal, padding": (partial(Encoder, causal=True), (batch(17), padding(17)), None),
    "odd": (Encoder, (batch(18),), None),
    "sequence first": (partial(Encoder, batch_first=False, causal=True), (batch(19),), None),
    "three heads": (partial(Encoder, heads=3), (batch(16), padding(16)), None),
    "three heads, causal": (partial(Encoder, heads=3, causal=True), (batch(17),), None),
    "short": (Encoder, (batch(3),), None),
    "by name": (Model, (batch(18),), BODY),
    "one key head": (partial(Model, key_heads=1), (batch(16),), BODY),
    "mask of the user": (
        partial(Model, way="none"),
        (batch(17), torch.ones(17, 17, dtype=torch.bool).tril().triu(-3)),
        BODY,
    ),
    "keys of the user": (partial(Model, way="none"), (batch(17), ~padding(17)), BODY),
    "causal mask of a part": (partial(Model, way="own mask"), (batch(18),), BODY),
    "checkpointed": (lambda: Wrapped(Encoder(causal=True)), (batch(16),), ["model.encoder"]),
    "checkpointed, short": (lambda: Wrapped(Model()), (batch(7),), ["model.body"]),
    "checkpointed, padding": (lambda: Wrapped(Model()), (batch(18),), ["model.body"]),
}

REFUSED: dict[str, Case] = {
    "differs": (partial(Model, way="cumsum"), (batch(16),), BODY),
    "window": (partial(Model, way="window"), (batch(16),), BODY),
    "bias": (partial(Model, way="bias"), (batch(16),), BODY),
    "half": (partial(Model, way="half"), (batch(16),), BODY),
    "mean": (partial(Model, way="mean"), (batch(16),), BODY),
    "square": (
        partial(Model, way="none"),
        (batch(16)[:, :3].repeat(4, 4), padding(12).repeat(4, 1)),
        BODY,
    ),
    "masks": (lambda: Wrapped(Encoder(), masks=True), (batch(16),), ["model.encoder"]),
    "nothing": (nn.Flatten, (batch(16),), None),
    "missing": (Model, (batch(16),), ["bodies"]),
    "nested": (Model, (batch(16),), ["body", "body.layers.0"]),
    "convolution": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv1d(2, 2, 3))),
        (batch(16),),
        ["0"],
    ),
    "no sequence": (
        lambda: nn.Sequential(nn.Linear(16, 16)),
        (torch.zeros(16),),
        ["0"],
    ),
}
