"""Models on every mesh of a number of ranks, beside one process: `python factorings.py 4`.

Prints the largest relative error of a gradient in float64, or why the mesh refuses the model. Each
mesh starts ranks of its own, as forks: a process group belongs to one strategy.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from context_models import WORDS, Encoder
from tensor_language import MODELS, inputs
from torch import Tensor

from stratagem import Lite, seed_everything
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.check.comparison import Subject, compare, default_loss
from stratagem_mesh.strategy import AXES

Sizes = tuple[int, ...]

LENGTH = 26
"""Words of a sequence: with 8 ranks each computes a part, and the last part is filled up."""
NAMED = {"vit, layers named": ("vit", ["vit.layers.*"])}
"""Models whose context_modules are given."""
NAMES = [*(name for name in MODELS if name != "llama, tied"), "encoder", *NAMED]


def build(name: str) -> Any:
    if name == "encoder":
        return Encoder(causal=True)
    kind, config, options = MODELS[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def batch(name: str, index: int) -> Any:
    """Return the inputs of a model, which depend on the data rank."""
    numbers = torch.Generator().manual_seed(index)
    if name == "encoder":
        return torch.randint(0, WORDS, (2, LENGTH), generator=numbers)
    with torch.random.fork_rng():
        made = inputs(build(name))
    return {key: _drawn(value, numbers) for key, value in made.items()}


def _drawn(example: Tensor, numbers: torch.Generator) -> Tensor:
    if example.is_floating_point():
        drawn = torch.randn(example.shape, generator=numbers, dtype=torch.float64)
        return drawn.to(torch.get_default_dtype())
    shape = (2, LENGTH) if example.ndim == 2 else example.shape
    return torch.randint(0, min(64, int(example.max()) + 1), shape, generator=numbers)


def loss(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return default_loss(model, batch)
    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def meshes(ranks: int) -> Iterator[Sizes]:
    """Yield the sizes of the axes whose product is the number of ranks."""
    sizes = [size for size in range(1, ranks + 1) if not ranks % size]
    yield from (found for found in product(sizes, repeat=len(AXES)) if prod(found) == ranks)


def words(sizes: Sizes) -> str:
    return " x ".join(f"{a} {n}" for a, n in zip(AXES, sizes, strict=True) if n > 1)


def options(name: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """Return the model and the arguments of the strategy."""
    model, modules = NAMED.get(name, (name, None))
    axes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
    return model, {**axes, "context_modules": modules, "launcher": "fork"}


def compared(name: str, sizes: Sizes) -> dict[str, Any]:
    """Return the differences from one process, or the refusal."""
    model, arguments = options(name, sizes)
    if model == "encoder":
        arguments["example_input"] = batch(model, 0)
    subject = Subject(partial(build, model), lambda index: batch(model, index), loss, arguments)
    try:
        rows = compare(subject, prod(sizes))
    except StratagemError as error:
        return {"refused": str(error).partition(": ")[2]}
    return {row.what: row.difference for row in rows}


def losses(name: str, sizes: Sizes, steps: int) -> float:
    """Return the largest relative difference of a loss from one process, in float32."""
    model, arguments = options(name, sizes)
    readers = sizes[1] * sizes[2]
    runs = []
    for ranks, strategy in ((prod(sizes), MeshStrategy(**arguments)), (1, "single_device")):
        lite = Lite(accelerator="cpu", devices=ranks, strategy=strategy)
        runs.append(lite.launch(trained, model, steps, readers))
    return max(abs(own - one) / abs(one) for own, one in zip(*runs, strict=True))


def trained(lite: Lite, name: str, steps: int, readers: int) -> list[float]:
    seed_everything(0)
    made = build(name).train()
    model, _ = lite.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    rank, count = lite.ranks.data_split
    found = []
    for step in range(steps):
        numbers = range(readers) if count == 1 else [rank]
        own = [batch(name, step * readers + number) for number in numbers]
        mean = lite.step(model, own, lambda batch: loss(model, batch))
        assert mean is not None
        found.append(float(lite.all_reduce(mean)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--meshes", nargs="*", help="such as 1,1,2,1,2 (default: each)")
    parser.add_argument("--steps", type=int, default=0, help="compare losses of so many steps")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    given = [tuple(map(int, text.split(","))) for text in chosen.meshes or ()]
    table: dict[str, dict[str, Any]] = {}
    for name in chosen.models:
        print(f"\n{name}")
        table[name] = {}
        for sizes in given or meshes(chosen.ranks):
            if chosen.steps:
                found: dict[str, Any] = {"losses": losses(name, sizes, chosen.steps)}
            else:
                found = compared(name, sizes)
            table[name][words(sizes)] = found
            print(f"  {words(sizes):40} {_cell(found)}", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(table))


def _cell(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused'][:150]}"
    if "losses" in found:
        return f"losses {found['losses']:.1e}"
    others = {what: value for what, value in found.items() if value > 1e-9}
    return f"{found['gradients']:.1e}" + (f"  differs: {others}" if others else "")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    main()
