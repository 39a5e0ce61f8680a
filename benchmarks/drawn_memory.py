"""Compares plans with real steps, for models and optimizers that a generator draws.

    python benchmarks/drawn_memory.py                                 # 20 models: about 20 minutes
    python benchmarks/drawn_memory.py --models 3 --scale 0.1 --strategies single_device fsdp
    python benchmarks/drawn_memory.py --seed 1 --results cells.jsonl        # a line for each cell

Each model is drawn from a seed: its kind, widths, depth, batch and optimizer. Two ranks on CPUs
then take two steps under each strategy. A cell has two ratios of predicted to measured bytes at the
maximum of the second step on rank 0:

- tensors: the bytes of its tensors, as `stratagem plan --measure` counts them.
- process: the growth of its resident memory, which the kernel counts. Workspaces of libraries are
  included. Linux only.

Goal: 95 of 100 cells within 10%.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from planned_memory import LSTM, MARK, Decoder, Residual, divide_layers
from torch import Tensor, nn
from torch.optim import Optimizer

STRATEGIES = (
    "single_device",
    "ddp",
    "ddp_sharded",
    "fsdp",
    "fsdp_cpu_offload",
    "model_parallel",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW loop": partial(torch.optim.AdamW, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
CLOSE = 0.1
WITHOUT_RESERVE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Variables by which glibc returns the memory of a freed tensor to the system at once."""


@dataclass(frozen=True)
class Drawn:
    """A model to train.

    Attributes:
        text: describes it.
        build: returns the model.
        batch: returns a batch for it.
        optimizer: the name in `OPTIMIZERS`.
    """

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    optimizer: str


class Bag(nn.Module):
    """The mean of embeddings, between a table and a small network."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes)
        )

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, (batch, classes)."""
        return self.body(self.table(words).mean(1))  # type: ignore[no-any-return]


class Projected(nn.Module):
    """A network behind a large matrix that is not trained."""

    matrix: Tensor

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.zeros(width, width))
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, (batch, classes)."""
        return self.body(inputs @ self.matrix)  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Residual blocks of growing widths, with batch norm, and a linear head."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        pairs = zip((3, *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(Residual(before, after, 2) for before, after in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, classes)."""
        return self.head(self.blocks(images).mean((2, 3)))  # type: ignore[no-any-return]


class Recurrent(LSTM):
    """Recurrent layers of a drawn width between an embedding and a head."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)


def perceptron(widths: Sequence[int], activation: type[nn.Module]) -> nn.Module:
    """Return linear layers with an activation between any two."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def draw(seed: int, index: int, scale: float) -> Drawn:
    """Return a model; each kind comes once before one comes again.

    Args:
        seed: of the generator.
        index: of the model.
        scale: multiplies widths; 1 has 50 to 400 MB of parameters, gradients and state.
    """
    generator = random.Random(f"{seed}/{index}")
    kinds = [_wide, _deep, _convolutions, _decoder, _bag, _projected, _recurrent]
    names = list(OPTIMIZERS)
    # One order for all models, so that few models already have every kind and every optimizer.
    random.Random(seed).shuffle(names)

    def number(low: int, high: int) -> int:
        return max(8, 8 * round(scale * generator.randint(low, high) / 8))

    text, build, batch = kinds[index % len(kinds)](generator, number)
    optimizer = names[index % len(names)]
    return Drawn(f"{text}, {optimizer}", build, batch, optimizer)


Parts = tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]


def _wide(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    widths = [number(256, 1024), number(2048, 5000), number(1024, 3000), number(8, 1000)]
    activation = generator.choice([nn.ReLU, nn.GELU, nn.Tanh])
    shape = generator.randint(4, 256), widths[0]
    text = f"wide perceptron {widths}, batch {shape[0]}"
    return text, partial(perceptron, widths, activation), partial(torch.zeros, shape)


def _deep(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    width, depth = number(384, 768), generator.randint(10, 24)
    shape = generator.randint(4, 512), width
    text = f"deep perceptron {depth} x {width}, batch {shape[0]}"
    return text, partial(perceptron, [width] * (depth + 1), nn.ReLU), partial(torch.zeros, shape)


def _convolutions(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    widths = [number(32, 96), number(128, 256), number(256, 512), number(256, 640)]
    classes, samples = number(10, 1000), generator.randint(2, 8)
    text = f"convolutions {widths}, batch {samples}"
    shape = samples, 3, 64, 64
    return text, partial(Convolutions, widths, classes), partial(torch.zeros, shape)


def _decoder(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    width, layers, words = number(256, 512), generator.randint(2, 6), number(2000, 8000)
    samples, length = generator.randint(1, 4), generator.choice([32, 64, 128])
    text = f"decoder {layers} x {width}, {words} words, batch {samples} x {length}"
    return text, partial(Decoder, width, layers, words), _words(samples, length)


def _bag(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    words, width, classes = number(20_000, 60_000), number(64, 256), number(10, 1000)
    samples = generator.randint(8, 128)
    text = f"embeddings {words} x {width}, batch {samples}"
    return text, partial(Bag, words, width, classes), _words(samples, 32)


def _projected(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    width, hidden, classes = number(2000, 4000), number(1000, 2000), number(10, 1000)
    samples = generator.randint(4, 64)
    text = f"buffer {width} x {width}, hidden {hidden}, batch {samples}"
    return text, partial(Projected, width, hidden, classes), partial(torch.zeros, samples, width)


def _recurrent(generator: random.Random, number: Callable[[int, int], int]) -> Parts:
    words, width, layers = number(2000, 6000), number(256, 768), generator.randint(1, 3)
    samples, length = generator.randint(2, 8), generator.randint(16, 64)
    text = f"LSTM {layers} x {width}, {words} words, batch {samples} x {length}"
    return text, partial(Recurrent, words, width, layers), _words(samples, length)


def _words(samples: int, length: int) -> Callable[[], Tensor]:
    return partial(torch.zeros, samples, length, dtype=torch.long)


def measure(seed: int, count: int, scale: float, strategies: Sequence[str]) -> None:
    """Take real steps of each model under each strategy; rank 0 prints a line for each cell."""
    divide_layers()
    tiny = Drawn("", lambda: perceptron([64, 64, 64], nn.ReLU), partial(torch.zeros, 8, 64), "SGD")
    for strategy in strategies:
        _measured(strategy, tiny)  # loads libraries, whose memory is no part of a cell
    for index in range(count):
        drawn = draw(seed, index, scale)
        for strategy in strategies:
            found, is_first = _measured(strategy, drawn)
            if is_first:
                print(MARK + json.dumps([index, strategy, found]), flush=True)


def _measured(strategy: str, drawn: Drawn) -> tuple[list[int] | str, bool]:
    """Return bytes of tensors and of the process, or an error; and whether this is rank 0."""
    from stratagem import Lite
    from stratagem_extras.planner.simulation import Workload, measure_step
    from stratagem_extras.planner.training import default_loss, optimizer_maker

    lite = Lite(
        accelerator="cpu", strategy=strategy, devices=1 if strategy == "single_device" else 2
    )
    lite.launch()
    gc.collect()
    before = _resident("VmRSS")

    def batch() -> Tensor:
        _forget_peak()  # each step begins with a batch, and the second one is the last
        return drawn.batch()

    optimizer = optimizer_maker(OPTIMIZERS[drawn.optimizer])
    try:
        phases = measure_step(lite.strategy, Workload(batch, default_loss, optimizer), drawn.build)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:200], lite.is_global_zero
    tensors = max(memory.total for memory in phases.values())
    return [tensors, _resident("VmHWM") - before], lite.is_global_zero


def _resident(name: str) -> int:
    """Return a figure of this process in bytes: "VmRSS", or its maximum "VmHWM"."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def planned(drawn: Drawn, strategies: Sequence[str]) -> dict[str, Any]:
    """Return the predicted bytes of each strategy, or why there are none."""
    from stratagem import plan_memory

    found: dict[str, Any] = {}
    for devices in (1, 2):
        names = [name for name in strategies if (name == "single_device") == (devices == 1)]
        if not names:
            continue
        optimizer = OPTIMIZERS[drawn.optimizer]
        plan = plan_memory(
            drawn.build, drawn.batch, optimizer=optimizer, devices=devices, strategies=names
        )
        for row in plan.strategies:
            found[row.name] = row.memory.total if row.memory else row.why_not
    return found


def cells(
    seed: int, count: int, scale: float, strategies: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Plan and measure each model under each strategy."""
    divide_layers()
    drawn = [draw(seed, index, scale) for index in range(count)]
    alone = [name for name in strategies if name == "single_device"]
    for names in ([name for name in strategies if name not in alone], alone):
        predictions: dict[int, dict[str, Any]] = {}
        for index, strategy, real in _measurements(str(seed), str(count), str(scale), names):
            if index not in predictions:
                predictions[index] = planned(drawn[index], names)
            cell = {"model": drawn[index].text, "strategy": strategy, "seed": seed}
            yield {**cell, **_compared(predictions[index][strategy], real)}


def _measurements(
    seed: str, count: str, scale: str, strategies: Sequence[str]
) -> Iterator[tuple[int, str, Any]]:
    """Yield the index of a model, a strategy, and what `measure` has found for them."""
    if not strategies:
        return
    command = [sys.executable, __file__, "--measure", seed, count, scale, *strategies]
    environment = {**os.environ, **WITHOUT_RESERVE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                yield tuple(json.loads(line.removeprefix(MARK)))
    if process.returncode:
        raise SystemExit(f"measuring ended with exit code {process.returncode}")


def _compared(predicted: int | str, real: list[int] | str) -> dict[str, Any]:
    if isinstance(predicted, str) or isinstance(real, str):
        return {"why_not": {"planned": predicted, "measured": real}}
    return {"predicted": predicted, "tensors": real[0], "process": real[1]}


def main() -> None:
    """Print a row for each cell, and how many are close."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of widths")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--results", type=Path, help="a file with a line for each cell")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.measure:
        seed, count, scale, *names = options.measure
        measure(int(seed), int(count), float(scale), names)
        return
    date = datetime.now(timezone.utc).date()
    print(f"{date}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    print("| model | strategy | predicted MiB | tensors | ratio | process | ratio |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for cell in cells(options.seed, options.models, options.scale, options.strategies):
        print(_row(cell), flush=True)
        found.append(cell)
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell) + "\n")
    print()
    for measured in ("tensors", "process"):
        ratios = [_ratio(cell, measured) for cell in found if "why_not" not in cell]
        close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
        print(f"{measured}: {close} of {len(ratios)} cells are within {CLOSE:.0%}")


def _row(cell: dict[str, Any]) -> str:
    head = f"| {cell['model']} | {cell['strategy']} | "
    if "why_not" in cell:
        return f"{head}{json.dumps(cell['why_not'])} | | | | |"
    figures = [f"{cell['predicted'] / 2**20:.1f}"]
    for measured in ("tensors", "process"):
        figures += [f"{cell[measured] / 2**20:.1f}", f"{_ratio(cell, measured):.3f}"]
    return f"{head}{' | '.join(figures)} |"


def _ratio(cell: dict[str, Any], measured: str) -> float:
    return float(cell["predicted"] / cell[measured])


if __name__ == "__main__":
    main()
