"""Models with experts on meshes, beside one process: `python expert_numbers.py OUT CASE...`.

Writes what differs in a step in float64, or the largest relative difference of a loss of 50 steps
in float32.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import expert_models as models
import torch

from stratagem import Lite, seed_everything
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.check.comparison import Subject, compare

NAMED = {"expert_modules": ["layers.*.experts"]}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "written, expert 2": ("Written", 2, {"expert": 2, **NAMED}),
    "written, expert 4": ("Written", 4, {"expert": 4, **NAMED}),
    "written, shard rest 2": ("Written", 4, {"expert": 2, **NAMED}),
    "written, replicate 2": ("Written", 4, {"expert": 2, "replicate": 2, **NAMED}),
    "written, checked": ("Written", 2, {"expert": 2, "check": True, **NAMED}),
    "all tokens to one expert": ("Unbalanced", 4, {"expert": 4, **NAMED}),
    "one expert on a rank": ("Few", 4, {"expert": 2, **NAMED}),
    "mixtral, expert 2": ("mixtral_eager", 2, {"expert": 2}),
    "mixtral, shard rest 2": ("mixtral_eager", 4, {"expert": 2}),
    "mixtral, tensor 2": ("mixtral_eager", 4, {"expert": 2, "tensor": 2}),
    "mixtral, context 2": ("mixtral_of_parts", 2, {"expert": 2, "context": 2}),
    "mixtral, shard 2 x context 2": (
        "mixtral_of_parts",
        4,
        {"expert": 4, "shard": 2, "context": 2},
    ),
    "mixtral, context 2 x tensor 2": (
        "mixtral_of_parts",
        4,
        {"expert": 2, "context": 2, "tensor": 2},
    ),
    "qwen3, expert 4": ("qwen3_eager", 4, {"expert": 4}),
    "qwen3, shard rest 2": ("qwen3_eager", 4, {"expert": 2}),
    "written, pipeline 2": ("Written", 4, {"pipeline": 2, "expert": 2, **NAMED}),
    "mixtral, pipeline 2": ("mixtral_of_parts", 4, {"pipeline": 2, "expert": 2}),
    "mixtral, pipeline 2 x context 2": (
        "mixtral_of_parts",
        4,
        {"pipeline": 2, "context": 2, "expert": 2},
    ),
    "mixtral, pipeline 2, router": ("mixtral_eager", 4, {"pipeline": 2, "expert": 2}),
    "mixtral, pipeline 2, grouped": ("mixtral_grouped", 4, {"pipeline": 2, "expert": 2}),
    "mixtral, grouped": ("mixtral", 2, {"expert": 2}),
    "mixtral, eager": ("mixtral_eager", 2, {"expert": 2}),
    "qwen3, grouped": ("qwen3", 4, {"expert": 2}),
}


def step(name: str) -> dict[str, float]:
    """Return the largest difference of each quantity of a step in float64."""
    model, ranks, options = CASES[name]
    subject = Subject(
        getattr(models, model), models.batch, models.loss, {"launcher": "fork", **options}
    )
    return {row.what: row.difference for row in compare(subject, ranks)}


def losses(name: str) -> float:
    """Return the largest relative difference of a loss of 50 steps."""
    model, ranks, options = CASES[name]
    mesh = MeshStrategy(launcher="fork", **options)
    on_mesh = Lite(accelerator="cpu", devices=ranks, strategy=mesh)
    readers = ranks // options.get("pipeline", 1)
    found = on_mesh.launch(trained, model, readers)
    expected = Lite(accelerator="cpu", devices=1).launch(trained, model, readers)
    return max(abs(own - one) / one for own, one in zip(found, expected, strict=True))


def of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return models.loss(model, batch)


def trained(lite: Lite, name: str, readers: int) -> list[float]:
    seed_everything(0)
    made = getattr(models, name)().train()
    model, _ = lite.setup(made, torch.optim.SGD(made.parameters(), lr=0.05))
    index, count = lite.ranks.data_split
    found = []
    for number in range(50):
        numbers = range(readers) if count == 1 else [index]
        own = [models.batch(number * readers + one) for one in numbers]
        value = lite.step(
            model, [part for each in own for part in each.chunk(2)], partial(of, model)
        )
        found.append(float(lite.all_reduce(value)))
    return found


def main() -> None:
    found: dict[str, Any] = {}
    for case in sys.argv[2:]:
        what, _, name = case.partition(":")
        try:
            found[case] = step(name) if what == "step" else losses(name)
        except StratagemError as error:
            found[case] = str(error)
        print(case, found[case], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main()
