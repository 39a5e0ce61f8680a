"""The time of a pipeline's step over the bound of its schedule, with stages that sleep.

    python benchmarks/pipeline_step.py [--positions 4] [--micro-batches 8] [--kilobytes 32]

Each rank over gloo runs `lite.step` on a model whose blocks sleep: 20 ms in the forward passes of
a rank's stages, and 40 ms in the backward passes. So the ranks need no cores of their own. The
bound is the time of the schedule without transfers and without cost of the host. It prints
the median of the steps after the first, from the first rank that begins to the last that ends.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem import Lite
from stratagem_mesh import MeshStrategy
from stratagem_mesh.pipeline.schedule import actions, timeline

FORWARD, BACKWARD = 0.02, 0.04
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


class Sleep(torch.autograd.Function):
    """The identity, which takes the time of a stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: float) -> Tensor:
        ctx.part = part
        time.sleep(FORWARD * part)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD * ctx.part)
        return gradients[0], None


class Block(nn.Module):
    """A block with one weight; it takes a part of the time of a rank's stages."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * self.weight, self.part)  # type: ignore[no-untyped-call]
        return slept


def measure(lite: Lite, options: argparse.Namespace, schedule: str, virtual: int) -> list[float]:
    """Return the times of the steps after the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(1 / virtual) for _ in range(options.positions * virtual)))
    prepared, _ = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [torch.ones(options.kilobytes, 256) for _ in range(options.micro_batches)]
    steps = []
    for _ in range(options.steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        lite.step(prepared, batches, lambda batch: prepared(batch).mean())
        spans: list[Any] = [None] * options.positions
        dist.all_gather_object(spans, (begin, time.perf_counter()))
        steps.append(max(end for _, end in spans) - min(start for start, _ in spans))
    return steps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--kilobytes", type=int, default=32, help="the size of a value; 32")
    options = parser.parse_args()
    print("| schedule | stages of a rank | bound, ms | step, ms | step / bound |")
    print("|---|---|---|---|---|")
    for schedule, virtual in CASES:
        count = options.positions
        times = [FORWARD / virtual] * count * virtual, [BACKWARD / virtual] * count * virtual
        bound = timeline(actions(schedule, count, virtual, options.micro_batches), *times).time
        strategy = MeshStrategy(
            pipeline=count, schedule=schedule, virtual_stages=virtual, launcher="fork"
        )
        lite = Lite(accelerator="cpu", devices=count, strategy=strategy)
        step = median(lite.launch(measure, options, schedule, virtual))
        cells = f"{1e3 * bound:.1f} | {1e3 * step:.1f} | {step / bound:.3f}"
        print(f"| {schedule} | {virtual} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
