"""A model without a plan on shard 2 x tensor 2, beside one process: `python tensor_mesh.py OUT`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensor_models import TOKENS, Language
from torch import Tensor

from stratagem_mesh.check.comparison import Subject, compare


def loss(model: Any, batch: Tensor) -> Tensor:
    squares: Tensor = model(batch).square()
    return squares.mean()


def batch(index: int) -> Tensor:
    return torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(index))


if __name__ == "__main__":
    build = partial(Language, fused=True, norm=True)
    rows = compare(Subject(build, batch, loss, {"tensor": 2, "example_input": TOKENS}), 4)
    Path(sys.argv[1]).write_text(json.dumps({row.what: row.difference for row in rows}))
