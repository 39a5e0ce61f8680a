"""Models on every mesh of a number of ranks, beside one process: `python factorings.py 4`.

Prints the largest relative error of a gradient in float64, or why the mesh refuses the model, and a
table in Markdown. Each mesh starts ranks of its own, as forks: a process group belongs to one
strategy.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from context_models import WORDS, Encoder
from pipeline_models import Graphs, UNet
from tensor_language import GROUPED, MODELS, inputs
from torch import Tensor
from torch.nn.functional import cross_entropy

from stratagem import Lite, seed_everything
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.check.comparison import Subject, compare, default_loss
from stratagem_mesh.strategy import AXES

Sizes = tuple[int, ...]
"""The sizes of `AXES`, and of the expert axis, which adds no ranks."""

LENGTH = 26
"""Words of a sequence: with 8 ranks each computes a part, and the last part is filled up."""
HEADS = 8
"""The most ranks that divide a layer, or a sequence."""
OF_EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "num_key_value_heads": 8}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: made for name, made in MODELS.items() if name != "llama, tied"},
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**OF_EXPERTS, "num_local_experts": 8}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**OF_EXPERTS, "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic", "num_labels": 3},
    ),
}
WITH_EXPERTS = "mixtral", "qwen3 moe"
OWN: dict[str, Callable[[int], Any]] = {
    "encoder": lambda layers: Encoder(causal=True, heads=HEADS, layers=layers),
    "unet": lambda layers: UNet(),
    "graphs": lambda layers: Graphs(2 * layers),
}
NAMED = {"vit, layers named": ("vit", ["vit.layers.*"])}
"""Models whose context_modules are given."""
NAMES = [*TRANSFORMERS, *OWN, *NAMED]


def build(name: str, layers: int = 2) -> Any:
    """Return a model; `layers` are those of each stack."""
    if name in OWN:
        return OWN[name](layers)
    kind, config, options = TRANSFORMERS[name]
    sizes = {**options, **{key: HEADS for key in options if key in _HEADS}}
    sizes |= {key: layers for key in options if key in _LAYERS}
    if "layer_types" in options:
        sizes["layer_types"] = options["layer_types"] * (layers // 2)
    if name == "resnet":
        sizes["depths"] = [max(2, layers // 2)] * 2
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    if name in WITH_EXPERTS:
        model.set_experts_implementation("eager")  # the kernel has no float64
    return model


_HEADS = {"n_head", "num_heads", "num_attention_heads"}
_HEADS |= {"num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads"}
_LAYERS = {"n_layer", "num_layers", "num_hidden_layers", "encoder_layers", "decoder_layers"}


def batch(name: str, index: int) -> Any:
    """Return the inputs of a model, which depend on the data rank."""
    numbers = torch.Generator().manual_seed(index)
    if name == "encoder":
        return torch.randint(0, WORDS, (2, LENGTH), generator=numbers)
    if name == "unet":
        return _normal((2, 2, 16, 16), numbers), _normal((2, 2, 16, 16), numbers)
    if name == "graphs":
        return {
            "x": _normal((7, 3), numbers),
            "edges": torch.randint(0, 7, (2, 12), generator=numbers),
            "graph": torch.tensor([0, 0, 0, 0, 1, 1, 1]),
            "y": _normal((2, 1), numbers),
        }
    if name == "resnet":
        pixels = _normal((2, 3, 32, 32), numbers)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (2,), generator=numbers)}
    with torch.random.fork_rng():
        made = inputs(build(name))
    return {key: _drawn(value, numbers) for key, value in made.items()}


def _normal(shape: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=numbers, dtype=torch.float64)
    return drawn.to(torch.get_default_dtype())


def _drawn(example: Tensor, numbers: torch.Generator) -> Tensor:
    if example.is_floating_point():
        return _normal(tuple(example.shape), numbers)
    shape = (2, LENGTH) if example.ndim == 2 else example.shape
    return torch.randint(0, min(64, int(example.max()) + 1), shape, generator=numbers)


def loss(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, tuple):
        images, noise = batch
        return (model(images + noise) - noise).square().mean()  # type: ignore[no-any-return]
    if isinstance(batch, Tensor):
        return cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    if "edges" in batch:
        return (model(batch) - batch["y"]).square().mean()  # type: ignore[no-any-return]
    return default_loss(model, batch)


def meshes(ranks: int, *, experts: bool = False) -> Iterator[Sizes]:
    """Yield the sizes of the axes whose product is the number of ranks."""
    sizes = [size for size in range(ranks, 0, -1) if not ranks % size]
    for found in product(sizes, repeat=len(AXES)):
        if prod(found) == ranks:
            _, _, shard, context, _ = found
            of_experts = [size for size in sizes if not shard * context % size]
            yield from ((*found, expert) for expert in (of_experts if experts else [1]))


def words(sizes: Sizes) -> str:
    axes = zip((*AXES, "expert"), sizes, strict=True)
    return " x ".join(f"{a} {n}" for a, n in axes if n > 1)


def options(name: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """Return the model and the arguments of the strategy."""
    model, modules = NAMED.get(name, (name, None))
    axes: dict[str, Any] = dict(zip((*AXES, "expert"), sizes, strict=True))
    arguments = {**axes, "context_modules": modules, "launcher": "fork"}
    if model in (*OWN, "resnet"):
        example = batch(model, 0)
        arguments["example_input"] = {"batch": example} if model == "graphs" else example
        if model == "unet":
            arguments["example_input"] = example[0]
    if model == "resnet" and sizes[0] == 8:
        arguments["pipeline_cuts"] = [
            f"resnet.encoder.stages.{stage}.layers.{layer}"
            for stage, layer in product(range(2), range(4))
        ][1:]
    return model, arguments


def depth(sizes: Sizes) -> int:
    """Return the layers of a stack: as many as the stages need."""
    return 2 if sizes[0] < 8 else 8


def compared(name: str, sizes: Sizes) -> dict[str, Any]:
    """Return the differences from one process, or the refusal."""
    model, arguments = options(name, sizes)
    subject = Subject(partial(build, model, depth(sizes)), partial(batch, model), loss, arguments)
    try:
        rows = compare(subject, prod(sizes[:-1]))
    except StratagemError as error:
        return {"refused": str(error).partition(": ")[2]}
    return {row.what: row.difference for row in rows}


def losses(name: str, sizes: Sizes, steps: int) -> dict[str, Any]:
    """Return the largest relative difference of a loss from one process, in float32."""
    model, arguments = options(name, sizes)
    pipeline, replicate, shard, *_ = sizes
    readers, each = replicate * shard, 2 if pipeline > 1 else 1
    runs = []
    for ranks, strategy in ((prod(sizes[:-1]), MeshStrategy(**arguments)), (1, "single_device")):
        lite = Lite(accelerator="cpu", devices=ranks, strategy=strategy)
        try:
            runs.append(lite.launch(trained, model, depth(sizes), steps, readers, each))
        except StratagemError as error:
            return {"refused": str(error).partition(": ")[2]}
    pairs = zip(*runs, strict=True)
    return {"losses": max(abs(own - one) / max(abs(one), 0.1) for own, one in pairs)}


def trained(lite: Lite, name: str, layers: int, steps: int, readers: int, each: int) -> list[float]:
    """Train; `each` of the readers has so many micro-batches in a step."""
    seed_everything(0)
    made = build(name, layers).train()
    model, _ = lite.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    rank, count = lite.ranks.data_split
    found = []
    for step in range(steps):
        numbers = range(rank, readers * each, count)
        own = [batch(name, step * readers * each + number) for number in numbers]
        mean = lite.step(model, own, lambda batch: loss(model, batch))
        assert mean is not None
        found.append(float(lite.all_reduce(mean)))
    return found


# -- the table

REASONS = {
    r"no .*(layer|pair|linear)|no layer is divided|tensor_plan": "no layer to divide",
    r"attends from one sequence to another|encoder-decoder": "attends between two sequences",
    r"input_ids|context_modules|sequence": "reads no sequence",
    r"module\(s\) with parameters to divide": "fewer modules than stages",
}
"""Why a mesh does not apply, by words of the refusal."""


def reason(refusal: str) -> str:
    found = (said for pattern, said in REASONS.items() if re.search(pattern, refusal))
    return next(found, refusal[:100].replace("|", "\\|"))


def markdown(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a row for each mesh, a column for each model, and the reasons of refusals."""
    rows = dict.fromkeys(mesh for of_model in table.values() for mesh in of_model)
    letters: dict[str, str] = {}
    lines = [f"| mesh | {' | '.join(table)} |", "|---" * (len(table) + 1) + "|"]
    for mesh in rows:
        cells = []
        for of_model in table.values():
            found = of_model.get(mesh, {})
            if "refused" in found:
                why = reason(found["refused"])
                cells.append(letters.setdefault(why, "abcdefghijklmnopqrst"[len(letters)]))
            else:
                cells.append(_shown(found) if found else "")
        lines.append(f"| {mesh} | {' | '.join(cells)} |")
    reasons = [f"- {letter}: {why}" for why, letter in letters.items()]
    return "\n".join([*lines, "", *reasons])


def _shown(found: Mapping[str, Any]) -> str:
    largest = max(found.values())
    return f"{largest:.0e}" if largest else "0"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--meshes", nargs="*", help="such as 1,1,2,1,2 (default: each)")
    parser.add_argument("--steps", type=int, default=0, help="compare losses of so many steps")
    parser.add_argument("--out", type=Path, help="a file of results, which it continues")
    parser.add_argument("--print", action="store_true", help="print the table of the file alone")
    chosen = parser.parse_args()
    given = [(*map(int, text.split(",")), 1)[: len(AXES) + 1] for text in chosen.meshes or ()]
    table: dict[str, dict[str, Any]] = {}
    if chosen.out and chosen.out.exists():
        table = json.loads(chosen.out.read_text())
    if not chosen.print:
        of_models = {
            name: given or [*meshes(chosen.ranks, experts=name in WITH_EXPERTS)]
            for name in chosen.models
        }
        for sizes in dict.fromkeys(one for found in of_models.values() for one in found):
            for name in (name for name, found in of_models.items() if sizes in found):
                own = table.setdefault(name, {})
                if words(sizes) in own:
                    continue
                steps = chosen.steps
                found = losses(name, sizes, steps) if steps else compared(name, sizes)
                own[words(sizes)] = found
                print(f"{name:18} {words(sizes):44} {_cell(found)}", flush=True)
                if chosen.out:
                    chosen.out.write_text(json.dumps(table))
    print(markdown({name: table[name] for name in chosen.models if name in table}))


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
