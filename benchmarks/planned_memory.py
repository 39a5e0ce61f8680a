"""Compares what `plan_memory` predicts with the tensors of real steps.

    python benchmarks/planned_memory.py                                # all: about an hour
    python benchmarks/planned_memory.py --models decoder lstm --strategies fsdp --precisions 32-true
    python benchmarks/planned_memory.py --results cells.jsonl               # a part, kept in a file
    python benchmarks/planned_memory.py --results cells.jsonl --write docs/guides/planning.md

The last puts the kept cells into the tables of a page, beside those that the page has already.

For each model, strategy and precision it takes two steps on CPUs, with two processes where the
strategy takes several, and counts the bytes of their tensors at the maximum of the second step. It
prints them beside the prediction, with the largest resident memory of rank 0 for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

MARK = "measured "
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
"""Between these lines of a page are the tables that this script has written."""
CHECKPOINTED = ", activation checkpointing"
"""The end of the title of a table."""
STRATEGIES = (
    "single_device",
    "ddp",
    "ddp_sharded",
    "fsdp",
    "fsdp_shard_grad_op",
    "fsdp_no_shard",
    "fsdp_cpu_offload",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
    "model_parallel",
)


class Decoder(nn.Module):
    """A causal transformer."""

    def __init__(self, width: int = 512, layers: int = 10, words: int = 4000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, words)."""
        hidden = self.embedding(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


class TiedEncoder(nn.Module):
    """A transformer whose head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8000)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, words)."""
        return self.head(self.layers(self.embedding(words)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions beside a projection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.projection = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return features, (batch, after, height / stride, width / stride)."""
        return torch.relu(self.body(images) + self.projection(images))


class ResNet(nn.Module):
    """Residual blocks at four resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.blocks = nn.Sequential(
            Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2)
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, 1000)."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Down and up again, with connections across."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 128, 256)
        self.down = nn.ModuleList(Residual(a, b, 1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList((Residual(256 + 128, 128, 1), Residual(128 + 64, 64, 1)))
        self.head = nn.Conv2d(64, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        kept = []
        for block in self.down:
            images = block(images)
            kept.append(images)
            images = nn.functional.max_pool2d(images, 2)
        images = nn.functional.interpolate(images, scale_factor=2)
        for block, other in zip(self.up, (kept[1], kept[0]), strict=True):
            images = nn.functional.interpolate(images, size=other.shape[2:])
            images = block(torch.cat((images, other), 1))
        return self.head(images)  # type: ignore[no-any-return]


class LSTM(nn.Module):
    """Three recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 512)
        self.recurrent = nn.LSTM(512, 512, 3, batch_first=True)
        self.head = nn.Linear(512, 5000)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, words)."""
        return self.head(self.recurrent(self.embedding(words))[0])  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A transformer over patches of images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 8, 8)
        self.position = nn.Parameter(torch.zeros(1, 64, 384))
        layer = nn.TransformerEncoderLayer(
            384, 6, 1536, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(384, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, 1000)."""
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.layers(hidden).mean(1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Layers of eight experts, of which each takes an equal part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 256)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                for _ in range(8)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(256, 4000)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, words)."""
        hidden = self.embedding(words)
        for layer in self.layers:
            parts = hidden.chunk(8, dim=1)
            chosen = [one(part) for one, part in zip(layer, parts, strict=True)]  # type: ignore[call-overload]
            hidden = hidden + torch.cat(chosen, 1)
        return self.head(hidden)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen decoder with trained matrices of rank 8 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Decoder(layers=6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4000, 8), nn.Linear(8, 4000)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, words)."""
        logits = self.base(words)
        return logits + self.up(self.down(logits))  # type: ignore[no-any-return]


class Table(nn.Module):
    """A small network over a large table that is not trained."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(50_000, 256))
        self.body = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1000))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, length, 1000)."""
        return self.body(self.table[words])  # type: ignore[no-any-return]


def _words(batch: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.zeros(batch, length, dtype=torch.long)


def _images(batch: int, size: int) -> Callable[[], Tensor]:
    return lambda: torch.zeros(batch, 3, size, size)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "decoder": (Decoder, _words(4, 128)),
    "tied": (TiedEncoder, _words(8, 128)),
    "resnet": (ResNet, _images(8, 64)),
    "unet": (UNet, _images(4, 64)),
    "lstm": (LSTM, _words(8, 64)),
    "vit": (ViT, _images(16, 64)),
    "experts": (Experts, _words(8, 64)),
    "adapted": (Adapted, _words(8, 64)),
    "table": (Table, _words(8, 64)),
    "wide": (lambda: Decoder(1024, 12, 32000), _words(2, 256)),
}


def divide_layers() -> None:
    """Let "model_parallel" divide pairs of linear layers between two ranks."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from stratagem import StrategyRegistry
    from stratagem.strategies import ModelParallelStrategy

    def divide(model: nn.Module, mesh: DeviceMesh) -> None:
        for part in model.modules():
            first, second = "", ""
            if isinstance(part, nn.TransformerEncoderLayer):
                first, second = "linear1", "linear2"
            elif isinstance(part, nn.Sequential) and isinstance(part[0], nn.Linear):
                first, second = "0", "2"
            if first:
                ways = {first: ColwiseParallel(), second: RowwiseParallel()}
                parallelize_module(part, mesh["tensor_parallel"], ways)

    StrategyRegistry.register(
        "model_parallel",
        ModelParallelStrategy,
        description="pairs of linear layers divided",
        override=True,
        tensor_parallel_size=2,
        parallelize_fn=divide,
    )


def measure(model: str, strategy: str, precision: str, checkpointing: str) -> None:
    """Take real steps on this rank, and print on rank 0 what they held."""
    from stratagem import Lite
    from stratagem.strategies import apply_activation_checkpointing
    from stratagem_extras.planner.simulation import Workload, measure_step
    from stratagem_extras.planner.training import default_loss

    divide_layers()
    build, batch = MODELS[model]
    devices = 1 if strategy == "single_device" else 2
    lite = Lite(accelerator="cpu", strategy=strategy, devices=devices, precision=precision)
    lite.launch()
    workload = Workload(
        batch,
        default_loss,
        lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]),
    )

    def made() -> nn.Module:
        module = build()
        apply_activation_checkpointing(module, checkpointing == "yes" or None)
        return module

    phases = measure_step(lite.strategy, workload, made)
    if lite.is_global_zero:
        tensors = max(memory.total for memory in phases.values())
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(MARK + json.dumps([tensors, resident]), flush=True)


def measured(*run: str, script: str = __file__) -> Any:
    """Return what a script has measured in a process of its own, or the last line of its error.

    Here: bytes of tensors and of resident memory.
    """
    command = [sys.executable, script, "--measure", *run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "out of memory" in line), lines[-1])[:100]


def main() -> None:
    """Print a row for each cell, and keep them; or write the tables of all that are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed"])
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument(
        "--results", type=Path, help="a file to which a line is added for each cell"
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put --results into a page's tables"
    )
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.measure:
        measure(*options.measure)
        return
    if options.write:
        _write(options.write, options.results)
        return
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    print("| model | precision | strategy | how | predicted MiB | measured | ratio | resident |")
    print("|---|---|---|---|---|---|---|---|")
    cells = []
    for model, precision in product(options.models, options.precisions):
        for cell in _cells(model, precision, options.strategies, options.checkpointing):
            print(_row(cell), flush=True)
            cells.append(cell)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cell) + "\n")
    print("\n" + _closeness([_ratio(cell) for cell in cells if "why_not" not in cell]))


def _cells(
    model: str, precision: str, strategies: Sequence[str], checkpointing: bool
) -> Iterator[dict[str, Any]]:
    """Plan a model, then measure it under one strategy after the other."""
    from stratagem import plan_memory

    divide_layers()
    build, batch = MODELS[model]
    rows: dict[str, Any] = {}
    for devices in (1, 2):
        names = [name for name in strategies if (name == "single_device") == (devices == 1)]
        if names:
            plan = plan_memory(
                build,
                batch,
                precision=precision,
                devices=devices,
                activation_checkpointing=checkpointing or None,
                strategies=names,
            )
            rows |= {row.name: row for row in plan.strategies}
    for strategy in strategies:
        row = rows[strategy]
        real = measured(model, strategy, precision, "yes" if checkpointing else "no")
        cell: dict[str, Any] = {
            "model": model,
            "precision": precision,
            "checkpointing": checkpointing,
            "strategy": strategy,
            "how": row.how,
        }
        if isinstance(real, str) or row.memory is None:
            cell["why_not"] = real if isinstance(real, str) else row.why_not
        else:
            tensors, resident = real
            cell |= {"predicted": row.memory.total, "measured": tensors, "resident": resident}
        yield cell


def _row(cell: dict[str, Any]) -> str:
    head = f"| {cell['model']} | {cell['precision']} | {cell['strategy']} | "
    if "why_not" in cell:
        return f"{head}{cell['why_not']} | | | | |"
    sizes = [f"{cell[name] / 2**20:.1f}" for name in ("predicted", "measured", "resident")]
    return f"{head}{cell['how']} | {sizes[0]} | {sizes[1]} | {_ratio(cell):.3f} | {sizes[2]} |"


def _ratio(cell: dict[str, Any]) -> float:
    return float(cell["predicted"] / cell["measured"])


def _closeness(ratios: Sequence[float]) -> str:
    close = [sum(abs(ratio - 1) <= within for ratio in ratios) for within in (0.1, 0.2)]
    return f"{close[0]} of {len(ratios)} cells are within 10%, and {close[1]} within 20%."


def _write(page: Path, results: Path) -> None:
    """Put cells into the tables of a page, and keep its other cells."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    tables = _figures_of(written)
    for line in results.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        title = cell["precision"] + (CHECKPOINTED if cell["checkpointing"] else "")
        tables.setdefault(title, {})[cell["strategy"], cell["model"]] = _figure(cell)
    parts = []
    for title, figures in sorted(tables.items()):
        models = [model for model in MODELS if any(key[1] == model for key in figures)]
        lines = [f"| strategy | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
        for strategy in STRATEGIES:
            texts = [figures.get((strategy, model), "") for model in models]
            if any(texts):
                lines.append(f"| `{strategy}` | {' | '.join(texts)} |")
        ratios = [float(text) for text in figures.values() if text not in ("", "-")]
        parts.append("\n\n".join((f"### {title}", _closeness(ratios), "\n".join(lines))))
    text = "\n\n".join(parts)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _figures_of(text: str) -> dict[str, dict[tuple[str, str], str]]:
    """Return what tables of `_write` say, by their titles, of each strategy and model."""
    tables: dict[str, dict[tuple[str, str], str]] = {}
    figures: dict[tuple[str, str], str] = {}
    models: list[str] = []
    for line in text.splitlines():
        first, *cells = [part.strip(" `") for part in line.split("|")[1:-1]] or [""]
        if line.startswith("### "):
            figures = tables.setdefault(line.removeprefix("### "), {})
        elif first == "strategy":
            models = cells
        elif first in STRATEGIES:
            figures |= {(first, model): cell for model, cell in zip(models, cells, strict=True)}
    return tables


def _figure(cell: dict[str, Any]) -> str:
    """Return the ratio; "-" where the strategy does not run."""
    return "-" if "why_not" in cell else f"{_ratio(cell):.2f}"


if __name__ == "__main__":
    main()
