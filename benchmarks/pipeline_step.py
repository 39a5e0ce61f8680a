"""The time of a pipeline's step over the bound of its schedule, with stages that sleep.

    python benchmarks/pipeline_step.py [--positions 4] [--micro-batches 8] [--kilobytes 32]

Each rank over gloo sleeps 20 ms in place of a forward pass of its stages, and 40 ms in place of a
backward pass, so the ranks need no cores of their own. The bound is the time of the
schedule without transfers and without cost of the host. It prints the median of the steps after
the first, from the first rank that begins to the last that ends.
"""

from __future__ import annotations

import argparse
import socket
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from stratagem_mesh.pipeline.run import Transfers, run_schedule
from stratagem_mesh.pipeline.schedule import actions, timeline
from stratagem_mesh.pipeline.values import Program, Value

FORWARD, BACKWARD = 0.02, 0.04
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


class Sleeping:
    """Stages that sleep; the first and the last one exchange less."""

    def __init__(self, stages: int, virtual: int, shape: tuple[int, ...]) -> None:
        self.last = stages - 1
        self.part = 1 / virtual
        self.made = torch.zeros(shape)

    def forward(self, stage: int, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        time.sleep(FORWARD * self.part)
        return [self.made] if stage < self.last else []

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        time.sleep(BACKWARD * self.part)
        return [self.made] if stage else []


def chain(stages: int, shape: tuple[int, ...]) -> Program:
    """Return a program in which each stage sends one tensor to the next."""
    values = (
        Value(("output", f"layers.{stage}", 0, 0), stage, (stage + 1,), shape, torch.float32, True)
        for stage in range(stages - 1)
    )
    return Program(tuple(values))


def measure(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    positions, micro_batches = options.positions, options.micro_batches
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=positions)
    groups = dist.new_group(), dist.new_group()
    transfers = Transfers(groups, range(positions), rank, torch.device("cpu"))
    if rank == 0:
        print("| schedule | stages of a rank | bound, ms | step, ms | step / bound |")
        print("|---|---|---|---|---|")
    shape = (options.kilobytes, 256)
    for schedule, virtual in CASES:
        stages = positions * virtual
        orders = actions(schedule, positions, virtual, micro_batches)
        times = [FORWARD / virtual] * stages, [BACKWARD / virtual] * stages
        bound = timeline(orders, *times).time
        programs = [chain(stages, shape)] * micro_batches
        work = Sleeping(stages, virtual, shape)
        steps = []
        for _ in range(options.steps + 1):
            dist.barrier()
            begin = time.perf_counter()
            run_schedule(orders, programs, work, transfers)
            spans: list[Any] = [None] * positions
            dist.all_gather_object(spans, (begin, time.perf_counter()))
            steps.append(max(end for _, end in spans) - min(start for start, _ in spans))
        step = median(steps[1:])
        if rank == 0:
            cells = f"{1e3 * bound:.1f} | {1e3 * step:.1f} | {step / bound:.3f}"
            print(f"| {schedule} | {virtual} | {cells} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--kilobytes", type=int, default=32, help="the size of a value; 32")
    options = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn(measure, (options, port), nprocs=options.positions)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
