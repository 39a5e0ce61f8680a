"""Options drawn by a seed, trained on a mesh and in one process: `python ... OUT SEED [SEED ...]`.

Each draw trains three steps, and again from a checkpoint of the second. The weights equal the ones
of one process. If the draw has options that cannot be exact, `refused_words` says which words the
error has, before the first step.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensor_models import Adapted
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem.callbacks import EMAWeightAveraging
from stratagem.checkpoint import consolidate_checkpoint
from stratagem.errors import RankFailedError, StratagemError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.strategy import AXES

WORDS, LONGEST, BATCH, STEPS = 16, 12, 8, 3
SLOW = 100
"""From this seed on, draws may be compiled."""
STAGES = 200
"""From this seed on, the mesh has a pipeline."""
EXPERTS = 400
"""From this seed on, blocks may have experts, and ranks divide them."""
SIZES = [(1, *size) for size in product((1, 2, 4), repeat=4) if prod(size) in (2, 4)]
OF_STAGES = [
    (stages, *size)
    for stages, size in product((2, 4), product((1, 2), repeat=4))
    if stages * prod(size) <= 4
]
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
FEED = {"body.*.up": "colwise", "body.*.down": "rowwise"}
HEADS = {**dict.fromkeys(("body.*.q", "body.*.k", "body.*.v"), "colwise"), "body.*.out": "rowwise"}
TORCH = {"self_attn": "multihead", "linear1": "colwise", "linear2": "rowwise"}
PLANS = {"causal": {**HEADS, **FEED}, "experts": {**HEADS, **FEED}, "feed": FEED, "encoder": TORCH}
TOLERANCES = {"32-true": 1e-4, "64-true": 1e-9, "bf16-mixed": 0.01}
"""Differences of weights, relative to the largest change of a weight in training.

With bf16-mixed, twice the difference of one process from 32-true if this is more.
"""
OPTIONS: dict[str, list[Any]] = {
    "sizes": SIZES,
    "model": ["causal", "causal", "encoder", "encoder", "feed"],
    "heads": [4, 4, 3],
    "length": [LONGEST, LONGEST, 11, 7],
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
    "weighted": [False, True],
    "sequence": [False, False, True],
    "loss": [*[False] * 5, True],
    "named": [True, True, False],
    "manual": [*[False] * 4, True],
    "checked": [True, False],
    "adapters": ["none", "none", "none", "lora", "another"],
    "compiled": [False, False, False, True],
    "pipeline": OF_STAGES,
    "schedule": ["1f1b", "gpipe", "interleaved"],
    "cuts": [False, True],
    "depth": [4, 6],
    "experts": [False, True],
}


class Feed(nn.Module):
    """Two layers, which may have adapters."""

    def __init__(self, width: int, adapters: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: Any = nn.Linear(width, 32)
        self.down: Any = nn.Linear(32, width)
        if adapters != "none":
            self.up, self.down = Adapted(self.up), Adapted(self.down)
        if adapters == "another":
            self.up.lora_variant = {"default": object()}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Block(Feed):
    """Causal attention, and two layers."""

    def __init__(self, width: int, adapters: str) -> None:
        super().__init__(width, adapters)
        self.num_heads, self.first = width // 4, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        parts = (layer(y).unflatten(-1, (-1, 4)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + self.out(attended.transpose(1, 2).flatten(2)))


class Experts(nn.Module):
    """Experts that compute the tokens that chose them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, width, 12) / 3)
        self.down = nn.Parameter(torch.randn(4, 12, width) / 3)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = (experts == expert).nonzero(as_tuple=True)
            own = (x[token] @ self.up[expert]).relu() @ self.down[expert]
            result = result.index_add(0, token, (own * weights[token, place, None]).to(x.dtype))
        return result


class Mixture(Block):
    """Causal attention, and two experts of each token."""

    def __init__(self, width: int, adapters: str) -> None:
        super().__init__(width, adapters)
        self.second, self.router = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        tokens = self.second(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        return x + self.experts(tokens, chosen, weights).view_as(x)


BLOCKS = {"experts": Mixture, "causal": Block, "feed": Feed, "encoder": nn.TransformerEncoderLayer}


def body_of(drawn: dict[str, Any]) -> Any:
    width = 4 * drawn["heads"]
    if drawn["model"] == "encoder":
        layer = nn.TransformerEncoderLayer(
            width, drawn["heads"], 32, 0.0, batch_first=True, norm_first=True
        )
        return nn.TransformerEncoder(layer, drawn["depth"], enable_nested_tensor=False)
    kind: Any = BLOCKS[drawn["model"]]
    return nn.Sequential(*(kind(width, drawn["adapters"]) for _ in range(drawn["depth"])))


class Net(Module):
    """Predicts the next word, or each word."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        super().__init__()
        width = 4 * drawn["heads"]
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.is_causal = drawn["model"] in ("causal", "experts")
        self.body = body_of(drawn)
        self.head = nn.Linear(width, WORDS, bias=not drawn["tied"])
        if drawn["tied"]:
            self.head.weight = self.words.weight
        if drawn["frozen"]:
            first = self.body.layers[0] if drawn["model"] == "encoder" else self.body[0]
            first.requires_grad_(False)
        self.is_ragged, self.is_weighted = drawn["ragged"], drawn["weighted"]
        self.automatic_optimization = not drawn["manual"]
        self.example_input_array = torch.zeros(2, drawn["length"], dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.body(self.words(ids) + self.positions(positions)))

    def labels(self, batch: Any) -> Tensor:
        """Return the labels; with `weighted` the number of valid ones differs by sequence."""
        ids, start = batch
        labels = pad(ids[:, 1:], (0, 1), value=-100) if self.is_causal else ids.clone()
        if not self.is_ragged:
            return labels
        place = torch.arange(ids.shape[1])
        end = len(place) if self.is_weighted else start[:, None] + 4
        is_ignored = (place >= start[:, None] + 1) & (place <= end)
        return labels.masked_fill(is_ignored, -100)

    def training_step(self, batch: Any) -> Tensor | None:
        loss = cross_entropy(self(batch[0]).flatten(0, 1), self.labels(batch).flatten())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Weighted(Net):
    def loss_weight(self, batch: Any) -> float:
        return float((self.labels(batch) != -100).sum())


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
    drawn = {name: numbers.choice(values) for name, values in OPTIONS.items()}
    if drawn["model"] == "encoder":
        drawn["adapters"] = "none"
    if drawn["sequence"]:  # blocks that read other positions are found by the comparison alone
        drawn["checked"] = True
    if drawn["manual"] and seed % 3:  # else the Trainer refuses most of them
        drawn |= {"accumulation": 1, "clipping": "none", "weighted": False}
    drawn["compiled"] = drawn["compiled"] and seed >= SLOW
    stages = drawn.pop("pipeline")
    if seed >= STAGES:
        drawn["sizes"] = stages
    else:
        drawn["depth"] = 2
    if drawn["experts"] and seed >= EXPERTS:
        drawn["model"] = "experts"
    drawn["experts"] = drawn["model"] == "experts" and prod(drawn["sizes"][2:4]) % 2 == 0
    return drawn


def refused_words(drawn: dict[str, Any]) -> list[str]:
    """Return words of which an error has to have one; none: the draw is exact."""
    return [words for words, is_refused in REFUSED.items() if is_refused(drawn)]


def has_tensor(drawn: dict[str, Any]) -> bool:
    return drawn["sizes"][4] > 1  # type: ignore[no-any-return]


def has_stages(drawn: dict[str, Any]) -> bool:
    return drawn["sizes"][0] > 1  # type: ignore[no-any-return]


def has_few_units(drawn: dict[str, Any]) -> bool:
    is_long = drawn["schedule"] == "interleaved" and drawn["sizes"][0] == 4
    return is_long and not has_cuts(drawn) and drawn["depth"] == 4  # type: ignore[no-any-return]


def has_odd_heads(drawn: dict[str, Any]) -> bool:
    return has_tensor(drawn) and drawn["heads"] == 3 and drawn["model"] != "feed"


REFUSED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "loss_weight": lambda drawn: drawn["manual"] and drawn["weighted"],
    "accumulate_grad_batches": lambda drawn: drawn["manual"] and drawn["accumulation"] > 1,
    "gradient_clip_val": lambda drawn: drawn["manual"] and drawn["clipping"] != "none",
    "context_modules": lambda drawn: (
        drawn["sizes"][3] > 1 and not drawn["named"] and drawn["model"] != "encoder"
    ),
    "loss_parallel=True": lambda drawn: has_tensor(drawn) and drawn["loss"],
    "num_heads=3": lambda drawn: has_odd_heads(drawn) and drawn["plan"],
    "sequence_parallel": lambda drawn: (
        has_odd_heads(drawn) and drawn["sequence"] and not drawn["plan"]
    ),
    "automatic_optimization = False": lambda drawn: has_stages(drawn) and drawn["manual"],
    "module(s) with parameters to divide": has_few_units,
    "was run on tensors without values": lambda drawn: (
        has_tensor(drawn) and drawn["model"] == "experts" and not drawn["plan"]
    ),
    "ranks of the tensor axis would": lambda drawn: drawn["experts"] and drawn["sequence"],
    "adapter of the kind": lambda drawn: has_tensor(drawn) and drawn["adapters"] == "another",
}
"""Words of an error, and whether a draw has to be refused with them."""


def loader(drawn: dict[str, Any], readers: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    count = 2 * BATCH + (BATCH // 2 if drawn["uneven"] else BATCH)
    length = drawn["length"]
    ids = torch.randint(0, WORDS, (count, length), generator=numbers)
    starts = torch.randint(0, length - 5, (count,), generator=numbers)
    return DataLoader(TensorDataset(ids, starts), batch_size=BATCH // readers)


def strategy(drawn: dict[str, Any]) -> Any:
    axes = dict(zip(AXES, drawn["sizes"], strict=True))
    options: dict[str, Any] = {
        "sequence_parallel": drawn["sequence"],
        "loss_parallel": drawn["loss"],
        "check_context": drawn["checked"],
    }
    if has_stages(drawn):
        options |= pipeline_options(drawn)
    if drawn["experts"]:
        options |= {"expert": 2, "expert_modules": ["experts"]}
    block = BLOCKS[drawn["model"]]
    if drawn["recomputed"]:
        options |= {"activation_checkpointing": {block}, "auto_wrap_policy": {block}}
    if drawn["plan"]:
        options["tensor_plan"] = PLANS[drawn["model"]]
    if drawn["named"] and drawn["model"] != "encoder":
        options["context_modules"] = ["body"]
    return MeshStrategy(**axes, **options, launcher="fork")


def pipeline_options(drawn: dict[str, Any]) -> dict[str, Any]:
    stages = drawn["sizes"][0]
    options: dict[str, Any] = {"schedule": drawn["schedule"]}
    if drawn["schedule"] == "interleaved":
        stages *= 2
        options["virtual_stages"] = 2
    if has_cuts(drawn):
        blocks = "body.layers" if drawn["model"] == "encoder" else "body"
        options["pipeline_cuts"] = [*(f"{blocks}.{i}" for i in range(1, 4)), "head"][-stages + 1 :]
    return options


def has_cuts(drawn: dict[str, Any]) -> bool:
    stages = drawn["sizes"][0] * (1 + (drawn["schedule"] == "interleaved"))
    return drawn["cuts"] and stages <= 5  # type: ignore[no-any-return]


def made(drawn: dict[str, Any]) -> Net:
    return (Weighted if drawn["weighted"] else Net)(drawn)


def train(drawn: dict[str, Any], folder: Path, ranks: int, path: Path | None = None) -> Any:
    """Train, and return the weights of the checkpoint at the end."""
    folder.mkdir()
    _, replicate, shard, _, _ = drawn["sizes"] if ranks > 1 else (1,) * 5
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
        compile={"backend": "aot_eager"} if drawn["compiled"] and ranks > 1 else False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    seed_everything(1)
    trainer.fit(made(drawn), loader(drawn, replicate * shard), ckpt_path=path)
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
    before = made(drawn).state_dict()
    assert found.keys() == expected.keys()
    apart, changed = (
        torch.cat([(one[name] - weight).flatten() for name, weight in expected.items()]).norm(order)
        for one in (found, before)
    )
    return float(apart / changed)


def outcome(drawn: dict[str, Any], folder: Path) -> str:
    words, mesh = refused_words(drawn), folder / "mesh"
    try:
        whole = train(drawn, mesh, prod(drawn["sizes"]))
    except StratagemError as error:
        is_told = any(each in str(error) for each in words)
        is_named = not isinstance(error, RankFailedError) or any(
            f"{kind}: " in str(error) for kind in ("ConfigurationError", "UserCodeError")
        )
        is_refused = is_told and is_named and not (mesh / "stepped").exists()
        return f"{'refused' if is_refused else 'failed'}: {error}"
    if words:
        return f"not refused: expected an error with one of {words}"
    resumed = train(drawn, folder / "resumed", prod(drawn["sizes"]), mesh / "middle")
    expected = train(drawn, folder / "alone", 1)
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
