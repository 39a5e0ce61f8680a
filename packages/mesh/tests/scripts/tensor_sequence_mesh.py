"""Sequence parallelism with shards and with a context axis: `tensor_sequence_mesh.py OUT`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensor_mesh import loss
from tensor_sequence import FEED, Text
from torch import Tensor

from stratagem_mesh.check.comparison import Subject, compare


def batch(index: int) -> Tensor:
    return torch.randint(0, 16, (2, 14), generator=torch.Generator().manual_seed(index))


MESHES: dict[str, dict[str, Any]] = {
    "shard": {"shard": 2, "tensor": 2},
    "context": {"context": 2, "tensor": 2, "context_modules": ["body"]},
}

if __name__ == "__main__":
    build = partial(Text, count=2, feed=True)
    options = {"tensor_plan": FEED, "sequence_parallel": True}
    found = {
        name: {
            row.what: row.difference
            for row in compare(Subject(build, batch, loss, {**sizes, **options}), 4)
        }
        for name, sizes in MESHES.items()
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
