"""Attention of torch on meshes of 2 and 4 ranks, beside one process: `... OUT`."""

from __future__ import annotations

import json
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensor_mesh import loss
from tensor_multihead import Encoder, Own, Pair
from torch import Tensor, nn

from stratagem_mesh.check.comparison import Subject, compare


class Text(nn.Module):
    """Layers of torch between an embedding and a head; a decoder reads the last tokens."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(16, 16), body()
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        inputs = (hidden, hidden[:, -5:]) if isinstance(self.body, Pair) else (hidden,)
        return self.head(self.body(*inputs))  # type: ignore[no-any-return]


def batch(index: int) -> Tensor:
    return torch.randint(0, 16, (2, 14), generator=torch.Generator().manual_seed(index))


BODIES: dict[str, Any] = {
    "encoder": Encoder,
    "encoder, causal": partial(Encoder, masked="causal", norm_first=True),
    "encoder, mask of heads": partial(Encoder, masked="heads"),
    "encoder and decoder": Pair,
    "own": Own,
}
CONTEXT = "encoder", "encoder, causal", "encoder, mask of heads"
PAIR = "encoder and decoder"
MESHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor 2": ({"tensor": 2}, (PAIR,)),
    "shard 2 x tensor 2": ({"shard": 2, "tensor": 2}, ("encoder", PAIR, "own")),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2}, CONTEXT),
    "sequence": ({"tensor": 2, "sequence_parallel": True}, (PAIR,)),
    "context 2, sequence": ({"context": 2, "tensor": 2, "sequence_parallel": True}, CONTEXT[:1]),
}

if __name__ == "__main__":
    example = {"example_input": batch(0)}
    found = {}
    for name, (options, bodies) in MESHES.items():
        sizes = [size for size in options.values() if size is not True]
        for body in bodies:
            subject = Subject(partial(Text, BODIES[body]), batch, loss, {**options, **example})
            rows = compare(subject, prod(sizes))
            found[f"{body} on {name}"] = {row.what: row.difference for row in rows}
    Path(sys.argv[1]).write_text(json.dumps(found))
