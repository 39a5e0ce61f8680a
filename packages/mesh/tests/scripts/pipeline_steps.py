"""Steps of a toy pipeline on real ranks: `python pipeline_steps.py RANKS WHAT`.

Each position writes out0.json and so on: what the test of WHAT asserts.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from stratagem_mesh.pipeline.run import Transfers, added, run_schedule
from stratagem_mesh.pipeline.schedule import Action, actions
from stratagem_mesh.pipeline.values import Program, Value

WIDTH = 6


def program(stages: int, rows: int) -> Program:
    """Return values that later stages read: a chain, skips to several readers, a mask, a count.

    Stage 0 makes a mask and a skip for all later stages, and an empty tensor for the last one. The
    last stage does not use the skip, so its gradient is None.
    """
    later = tuple(range(1, stages))

    def value(name: str, stage: int, readers: Any, shape: Any, dtype: Any, grad: bool) -> Value:
        return Value(("output", name, 0, stage), stage, tuple(readers), shape, dtype, grad)

    values = []
    for stage in range(stages - 1):
        rising = value("x", stage, [stage + 1], (rows, WIDTH), torch.float32, True)
        values.append(rising)
        if stage == 0:
            values += [
                value("skip", 0, later, (WIDTH, rows), torch.float32, True),
                value("mask", 0, later, (rows, 1), torch.bool, False),
                value("scale", 0, later[:1], (), torch.float64, True),
                value("none", 0, later[-1:], (0, 3), torch.bfloat16, False),
            ]
    return Program(tuple(values))


class Toy:
    """The stages of one rank, or of all in one process."""

    def __init__(self, stages: int, rows: list[int]) -> None:
        self.stages = stages
        generator = torch.Generator().manual_seed(3)
        self.weights = [
            torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_() for _ in range(stages)
        ]
        self.batches = [torch.randn(n, WIDTH, generator=generator) for n in rows]
        self.programs = {n: program(stages, n) for n in set(rows)}
        self.rows = rows
        self.kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor], Tensor | None]] = {}
        self.order: list[Action] = []

    def compute(self, stage: int, micro_batch: int, read: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = self.weights[stage]
        if stage == 0:
            x = (self.batches[micro_batch] @ weight).tanh()
            return {
                "x": x,
                # Not contiguous.
                "skip": x.sin().t(),
                "mask": x.detach().sum(1, keepdim=True) > 0,
                "scale": x.double().mean(),
                "none": x.new_empty(0, 3, dtype=torch.bfloat16),
            }
        x = read["x"] @ weight
        if stage < self.stages - 1 or self.stages == 2:
            x = x + read["skip"].t() * read["mask"]
        if "scale" in read:
            x = x * read["scale"].float()
        # The gradient of a sum is expanded.
        return {"x": x + 0 if stage < self.stages - 1 else x.sum()}

    def forward(self, stage: int, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        self.order.append(Action("forward", stage, micro_batch))
        of_batch = self.programs[self.rows[micro_batch]]
        reads = of_batch.reads(stage)
        for value, tensor in zip(reads, received, strict=True):
            assert tensor.is_leaf
            assert tensor.requires_grad is value.differentiable
            assert (tuple(tensor.shape), tensor.dtype) == (value.shape, value.dtype)
        read = {value.key[1]: tensor for value, tensor in zip(reads, received, strict=True)}
        made = self.compute(stage, micro_batch, read)
        loss = made["x"] if stage == self.stages - 1 else None
        sent = [made[value.key[1]] for value in of_batch.sends(stage)]
        differentiable = [tensor for tensor in sent if tensor.requires_grad]
        self.kept[stage, micro_batch] = received, differentiable, loss
        return sent

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        self.order.append(Action("backward", stage, micro_batch))
        received, made, loss = self.kept.pop((stage, micro_batch))
        if loss is not None:
            assert not gradients
            torch.autograd.backward(loss)
        else:
            torch.autograd.backward(made, [added(of_value) for of_value in gradients])
        return [tensor.grad for tensor in received]


def in_one_process(stages: int, rows: list[int]) -> list[Tensor]:
    """Return the gradients of all stages of whole forward and backward passes."""
    toy = Toy(stages, rows)
    for micro_batch in range(len(rows)):
        first = made = toy.compute(0, micro_batch, {})
        for stage in range(1, stages):
            read = {k: first[k] for k in ("skip", "mask")} | {"x": made["x"]}
            made = toy.compute(
                stage, micro_batch, read | ({"scale": first["scale"]} if stage == 1 else {})
            )
        torch.autograd.backward(made["x"])
    return [weight.grad for weight in toy.weights if weight.grad is not None]


def gathered(found: Any) -> list[Any]:
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, found)
    return everything


def case(
    transfers: Transfers, schedule: str, virtual: int, rows: list[int], steps: int = 2
) -> dict[str, Any]:
    """Run steps; return whether gradients and orders are right, on all ranks."""
    positions = len(transfers.ranks)
    stages = positions * virtual
    orders = actions(schedule, positions, virtual, len(rows))
    toy = Toy(stages, rows)
    own = range(transfers.position, stages, positions)
    for _ in range(steps):
        toy.order.clear()
        for weight in toy.weights:
            weight.grad = None
        run_schedule(orders, [toy.programs[n] for n in rows], toy, transfers)
    expected = in_one_process(stages, rows)
    received = [toy.weights[stage].grad for stage in own]
    equal = all(
        gradient is not None and torch.equal(expected[stage], gradient)
        for stage, gradient in zip(own, received, strict=True)
    )
    told = {
        "equal": equal,
        "in order": toy.order == orders[transfers.position],
        "idle": transfers.doing() == "" and not toy.kept,
        "others": all(toy.weights[s].grad is None for s in range(stages) if s not in own),
    }
    all_told = gathered(told)
    return {name: all(one[name] for one in all_told) for name in told}


class Failing(Toy):
    """Stage 1 fails in the backward pass of micro-batch 1."""

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        if (stage, micro_batch) == (1, 1):
            raise ZeroDivisionError("of the stage")
        return super().backward(stage, micro_batch, gradients)


class Late(Toy):
    """Stage 1 takes longer than the timeout of the groups."""

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        if (stage, micro_batch) == (1, 1):
            time.sleep(3 * TIMEOUT)
        return super().backward(stage, micro_batch, gradients)


class Longer(Toy):
    """Stage 0 makes a value of another shape than its program has."""

    def compute(self, stage: int, micro_batch: int, read: dict[str, Tensor]) -> dict[str, Tensor]:
        made = super().compute(stage, micro_batch, read)
        if stage == 0:
            made["x"] = torch.cat([made["x"], made["x"]])
        return made


class Large:
    """Stages that exchange 16 MB and keep nothing."""

    def __init__(self, stages: int) -> None:
        self.last = stages - 1
        shape = 2**22
        values = (
            Value(("output", "large", 0, stage), stage, (stage + 1,), (shape,), torch.float32, True)
            for stage in range(self.last)
        )
        self.program = Program(tuple(values))

    def forward(self, stage: int, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        return [torch.ones(2**22)] if stage < self.last else []

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        return [torch.ones(2**22)] if stage else []


TIMEOUT = 2.0


def end_of(transfers: Transfers, toy: Toy, rows: list[int]) -> dict[str, Any]:
    """Return the error that ends a step, what the rank did, and after which time."""
    orders = actions("1f1b", len(transfers.ranks), 1, len(rows))
    begin = time.monotonic()
    try:
        run_schedule(orders, [toy.programs[n] for n in rows], toy, transfers)
    except Exception as error:
        name = type(error).__name__
        seconds = time.monotonic() - begin
        return {"error": f"{name}: {error}", "doing": transfers.doing(), "seconds": seconds}
    return {"error": "", "doing": transfers.doing(), "seconds": 0.0}


def peak() -> float:
    """Return the largest memory of this process until now, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(transfers: Transfers) -> float:
    positions = len(transfers.ranks)
    work = Large(positions)
    orders = actions("1f1b", positions, 1, 32)
    begin = peak()
    run_schedule(orders, [work.program] * 32, work, transfers)
    return peak() - begin


def steps(transfers: Transfers) -> dict[str, Any]:
    found = {}
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)):
        for count in (1, 2, 3, 5, 8):
            rows = [4] * (count - 1) + [3]
            found[f"{schedule}, {virtual}, {count}"] = case(transfers, schedule, virtual, rows)
    return found


ROWS = [4] * 4
WHAT: dict[str, Callable[[Transfers], Any]] = {
    "steps": steps,
    "failing": lambda transfers: end_of(transfers, Failing(len(transfers.ranks), ROWS), ROWS),
    "late": lambda transfers: end_of(transfers, Late(len(transfers.ranks), ROWS), ROWS),
    "longer": lambda transfers: end_of(transfers, Longer(len(transfers.ranks), ROWS), ROWS),
    "growth": growth,
}


def joined(rank: int, ranks: int, port: int) -> Transfers:
    """Join the ranks; position p is rank P - 1 - p, as in a mesh."""
    address, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timeout
    )
    short = timedelta(seconds=TIMEOUT if sys.argv[2] == "late" else 60)
    groups = dist.new_group(timeout=short), dist.new_group(timeout=short)
    order = [ranks - 1 - position for position in range(ranks)]
    return Transfers(groups, order, order.index(rank), torch.device("cpu"))


def work(rank: int, ranks: int, port: int, what: str) -> None:
    torch.set_num_threads(1)
    transfers = joined(rank, ranks, port)
    found = WHAT[what](transfers)
    Path(f"out{transfers.position}.json").write_text(json.dumps(found))
    if what in ("steps", "growth"):
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    ranks, what = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn(work, (ranks, port, what), nprocs=ranks)


if __name__ == "__main__":
    main()
