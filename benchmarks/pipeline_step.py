"""The time of a pipeline's step over the bound of its schedule, with stages that sleep.

    python benchmarks/pipeline_step.py [--positions 4] [--micro-batches 8] [--forward 20]

Each rank over gloo runs `lite.step` on a model whose blocks sleep: 20 ms in the forward passes of
a rank's stages, and twice as long in the backward passes. So the ranks need cores of their own
between the sleeps alone. The bound is the time of the schedule without transfers, without cost of
the host, and with exact sleeps. It prints the median of the steps after the first, from the first
rank that begins to the last that ends.

The overhead is (step - bound) / micro-batches. With longer sleeps it grows less than the bound, so
that the ratio falls: for stages of other lengths, measure with `--forward`.
The last column is the part of it by which sleeps took longer than asked for, on the rank with most.
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

CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


class Sleep(torch.autograd.Function):
    """The identity, which takes the time of a stage."""

    longer = 0.0
    """The seconds by which all sleeps of this rank took longer than asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Sleep.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        Sleep.sleep(2 * ctx.seconds)
        return gradients[0], None

    @staticmethod
    def sleep(seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        Sleep.longer += time.perf_counter() - begin - seconds


class Block(nn.Module):
    """A block with one weight, which sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return slept


def measure(lite: Lite, options: argparse.Namespace, virtual: int) -> list[tuple[float, float]]:
    """Return the time of each step after the first, and how much longer a rank's sleeps took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = options.positions * virtual
    model = nn.Sequential(*(Block(options.forward / 1e3 / virtual) for _ in range(blocks)))
    prepared, _ = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [torch.ones(options.kilobytes, 256) for _ in range(options.micro_batches)]
    steps = []
    for _ in range(options.steps + 1):
        Sleep.longer = 0.0
        dist.barrier()
        begin = time.perf_counter()
        lite.step(prepared, batches, lambda batch: prepared(batch).mean())
        spans: list[Any] = [None] * options.positions
        dist.all_gather_object(spans, (begin, time.perf_counter(), Sleep.longer))
        begins, ends, longer = zip(*spans, strict=True)
        steps.append((max(ends) - min(begins), max(longer)))
    return steps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--kilobytes", type=int, default=32, help="the size of a value; 32")
    parser.add_argument("--forward", type=float, default=20, help="ms of a rank's stages; 20")
    options = parser.parse_args()
    count, micro_batches, forward = options.positions, options.micro_batches, options.forward
    print(
        f"{count} ranks, {micro_batches} micro-batches; the stages of a rank sleep {forward:g} ms "
        f"forward and {2 * forward:g} ms backward for each\n"
    )
    print(
        "| schedule | stages of a rank | bound, ms | step, ms | step / bound "
        "| overhead of a micro-batch, ms | of which sleeps, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for schedule, virtual in CASES:
        forwards, backwards = (
            [each / virtual] * count * virtual for each in (forward, 2 * forward)
        )
        orders = actions(schedule, count, virtual, micro_batches)
        bound = timeline(orders, forwards, backwards).time
        strategy = MeshStrategy(
            pipeline=count, schedule=schedule, virtual_stages=virtual, launcher="fork"
        )
        lite = Lite(accelerator="cpu", devices=count, strategy=strategy)
        taken, longer = zip(*lite.launch(measure, options, virtual), strict=True)
        step, slept = 1e3 * median(taken), 1e3 * median(longer)
        print(
            f"| {schedule} | {virtual} | {bound:.1f} | {step:.1f} | {step / bound:.3f} "
            f"| {(step - bound) / micro_batches:.2f} | {slept / micro_batches:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
