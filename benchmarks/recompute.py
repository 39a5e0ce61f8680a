"""Measures activation checkpointing between none and full: memory beside the plan, and time.

    python benchmarks/recompute.py
    python benchmarks/recompute.py --layers 12 --width 512 --batch 8 --tokens 256 --budget 1.5GB

Each choice trains a transformer in this process on the CPU: two steps whose tensors are counted,
then steps that are timed, in turn with those of the other choices. The planned bytes are those of
`plan_memory` for the strategy single_device. `--budget` adds the choice of `recompute_within`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from stratagem import Lite, plan_memory
from stratagem.strategies import Recompute, apply_activation_checkpointing
from stratagem_extras.planner.budget import recompute_within
from stratagem_extras.planner.simulation import Workload, measure_step
from stratagem_extras.planner.training import default_loss, optimizer_maker

CHOICES: dict[str, Recompute | None] = {
    "none": None,
    "matmul, half": Recompute(keep="matmul", share=0.5),
    "matmul": Recompute(keep="matmul"),
    "half": Recompute(share=0.5),
    "full": Recompute(),
}


def build(layers: int, width: int) -> nn.Module:
    """Return the transformer."""
    parts = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, activation="gelu")
        for _ in range(layers)
    ]
    return nn.Sequential(*parts)


def held(model: Callable[[], nn.Module], batch: torch.Tensor) -> int:
    """Return the bytes of tensors of a real step."""
    lite = Lite(accelerator="cpu")
    lite.launch()
    workload = Workload(lambda: batch.clone(), default_loss, optimizer_maker("AdamW"))
    return max(memory.total for memory in measure_step(lite.strategy, workload, model).values())


def main() -> None:
    """Print a row for each choice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--budget")
    options = parser.parse_args()
    whole = partial(build, options.layers, options.width)
    batch = torch.randn(options.batch, options.tokens, options.width)
    choices = dict(CHOICES)
    if options.budget:
        choices[f"budget {options.budget}"] = recompute_within(whole, batch, options.budget).choice

    def checkpointed(choice: Recompute | None) -> nn.Module:
        made = whole()
        apply_activation_checkpointing(made, choice)
        return made

    planned, measured, trained = {}, {}, {}
    for name, choice in choices.items():
        plan = plan_memory(
            whole, batch, activation_checkpointing=choice, strategies=["single_device"]
        )
        memory = plan.strategies[0].memory
        planned[name] = 0 if memory is None else memory.total
        measured[name] = held(partial(checkpointed, choice), batch)
        model: Any = checkpointed(choice)
        trained[name] = model, torch.optim.AdamW(model.parameters())
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(options.steps):
        for name, (model, optimizer) in trained.items():
            begin = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - begin)
    first = statistics.median(seconds["none"])
    print(f"{'choice':20} {'planned MB':>10} {'measured MB':>11} {'ratio':>6} {'time':>6}")
    for name in choices:
        ratio = planned[name] / measured[name]
        took = statistics.median(seconds[name]) / first
        sizes = f"{planned[name] / 1e6:10.1f} {measured[name] / 1e6:11.1f}"
        print(f"{name:20} {sizes} {ratio:6.3f} {took:6.2f}")


if __name__ == "__main__":
    main()
