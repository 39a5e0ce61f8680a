"""Options drawn by a seed, trained on a mesh and in one process: `python ... OUT SEED [SEED ...]`.

Each draw trains three steps, and again from a checkpoint of the second. The weights equal the ones
of one process, or the mesh refuses the options before the first step.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem.callbacks import EMAWeightAveraging
from stratagem.checkpoint import consolidate_checkpoint
from stratagem.errors import ConfigurationError, RankFailedError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.strategy import AXES

WORDS, LENGTH, BATCH, STEPS = 16, 12, 8, 3
SIZES = [size for size in product((1, 2, 4), repeat=4) if prod(size) in (2, 4)]
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
PLAN = {
    **dict.fromkeys(("body.*.q", "body.*.k", "body.*.v", "body.*.up"), "colwise"),
    **dict.fromkeys(("body.*.out", "body.*.down"), "rowwise"),
}
TOLERANCES = {"32-true": 1e-4, "64-true": 1e-9, "bf16-mixed": 0.01}
"""Differences of weights, relative to the largest change of a weight in training.

With bf16-mixed, twice the difference of one process from 32-true if this is more.
"""
OPTIONS: dict[str, list[Any]] = {
    "sizes": SIZES,
    "model": ["causal", "encoder"],
    "precision": list(TOLERANCES),
    "accumulation": [1, 2, 3],
    "clipping": list(CLIPPING),
    "recomputed": [False, True],
    "frozen": [False, True],
    "average": [False, True],
    "tied": [False, True],
    "plan": [False, True],
    "ragged": [False, True],
    "uneven": [False, True],
    "form": ["single_file", "directory"],
}


class Block(nn.Module):
    """Causal attention with 4 heads, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shape = (*x.shape[:2], -1, 4)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.second(x)).relu())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Net(Module):
    """Predicts the next word, or each word."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.is_causal = drawn["model"] == "causal"
        self.body = nn.Sequential(Block(), Block()) if self.is_causal else encoder()
        self.head = nn.Linear(16, WORDS, bias=not drawn["tied"])
        if drawn["tied"]:
            self.head.weight = self.words.weight
        if drawn["frozen"]:
            first: nn.Module = self.body[0] if self.is_causal else self.body.layers[0]
            first.requires_grad_(False)
        self.is_ragged = drawn["ragged"]
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(LENGTH, device=ids.device)
        return self.head(self.body(self.words(ids) + self.positions(positions)))

    def training_step(self, batch: Any) -> Tensor:
        ids, start = batch
        labels = pad(ids[:, 1:], (0, 1), value=-100) if self.is_causal else ids.clone()
        if self.is_ragged:  # as many in each sequence
            place = torch.arange(LENGTH)
            ignored = (place >= start[:, None]) & (place < start[:, None] + 4)
            labels = labels.masked_fill(ignored, -100)
        return cross_entropy(self(ids).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Saves(Callback):
    """Saves after the second step and at the end; notes that a step was taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if trainer.is_global_zero and trainer.global_step:
            (self.folder / "stepped").touch()
        path = self.folder / "middle"
        if trainer.global_step == STEPS - 1 and not path.exists():
            trainer.strategy.barrier()
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end", weights_only=True)


def draw(seed: int) -> dict[str, Any]:
    numbers = random.Random(seed)
    return {name: numbers.choice(values) for name, values in OPTIONS.items()}


def loader(drawn: dict[str, Any], readers: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    count = 2 * BATCH + (BATCH // 2 if drawn["uneven"] else BATCH)
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=numbers)
    starts = torch.randint(0, LENGTH - 5, (count,), generator=numbers)
    return DataLoader(TensorDataset(ids, starts), batch_size=BATCH // readers)


def strategy(drawn: dict[str, Any]) -> Any:
    axes = dict(zip(AXES, drawn["sizes"], strict=True))
    options: dict[str, Any] = {}
    block = Block if drawn["model"] == "causal" else nn.TransformerEncoderLayer
    if drawn["recomputed"]:
        options = {"activation_checkpointing": {block}, "auto_wrap_policy": {block}}
    if drawn["plan"] and drawn["model"] == "causal":
        options["tensor_plan"] = PLAN
    if drawn["model"] == "causal":
        options["context_modules"] = ["body"]
    return MeshStrategy(**axes, **options, launcher="fork")


def train(drawn: dict[str, Any], folder: Path, ranks: int, path: Path | None = None) -> Any:
    """Train, and return the weights of the checkpoint at the end."""
    folder.mkdir()
    replicate, shard, _, _ = drawn["sizes"] if ranks > 1 else (1, 1, 1, 1)
    averages = [EMAWeightAveraging(decay=0.5)] if drawn["average"] else []
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(drawn) if ranks > 1 else "single_device",
        precision=drawn["precision"],
        max_steps=STEPS,
        accumulate_grad_batches=drawn["accumulation"],
        **CLIPPING[drawn["clipping"]],
        callbacks=[*averages, Saves(folder)],
        plugins=drawn["form"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    seed_everything(1)
    trainer.fit(Net(drawn), loader(drawn, replicate * shard), ckpt_path=path)
    end = folder / "end"
    if end.is_dir():
        consolidate_checkpoint(end, folder / "file")
        end = folder / "file"
    return torch.load(end, weights_only=True)["state_dict"]


def difference(found: Any, expected: Any, drawn: dict[str, Any]) -> float:
    """Return the largest difference of a weight, relative to the largest change.

    With bf16-mixed, the norms of both: rounding changes some elements of clipped gradients much.
    """
    order = 2.0 if drawn["precision"] == "bf16-mixed" else torch.inf
    seed_everything(1)
    before = Net(drawn).state_dict()
    assert found.keys() == expected.keys()
    apart, changed = (
        torch.cat([(one[name] - weight).flatten() for name, weight in expected.items()]).norm(order)
        for one in (found, before)
    )
    return float(apart / changed)


def outcome(drawn: dict[str, Any], folder: Path) -> str:
    expected = train(drawn, folder / "alone", 1)
    mesh = folder / "mesh"
    try:
        whole = train(drawn, mesh, prod(drawn["sizes"]))
        resumed = train(drawn, folder / "resumed", prod(drawn["sizes"]), mesh / "middle")
    except (ConfigurationError, RankFailedError) as error:
        is_named = isinstance(error, ConfigurationError) or "ConfigurationError: " in str(error)
        kind = "refused" if is_named and not (mesh / "stepped").exists() else "failed"
        return f"{kind}: {error}"
    tolerance = TOLERANCES[drawn["precision"]]
    if drawn["precision"] == "bf16-mixed":
        exact = train({**drawn, "precision": "32-true"}, folder / "exact", 1)
        tolerance = max(tolerance, 2 * difference(expected, exact, drawn))
    apart = difference(whole, expected, drawn)
    again = difference(resumed, whole, drawn)
    kind = "exact" if apart <= tolerance and again == 0 else "differs"
    return f"{kind}: {apart:.1e} (at most {tolerance:.1e}), resumed {again:.1e}"


def main(out: str, *seeds: str) -> None:
    found = {}
    for seed in seeds:
        drawn = draw(int(seed))
        with tempfile.TemporaryDirectory() as folder:
            found[seed] = {"drawn": drawn, "outcome": outcome(drawn, Path(folder))}
        print(seed, *drawn.values(), "->", found[seed]["outcome"][:3000], flush=True)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*sys.argv[1:])
