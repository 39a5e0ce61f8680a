"""Collectives of the strategy's ranks: every operation, with values that differ by rank."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stratagem_testing.strategies.check import CHECKS, Result, check, judge_of
from stratagem_testing.strategies.judging import close, ratio
from stratagem_testing.strategies.models import LARGE, Learner
from stratagem_testing.strategies.probe import Probe

REDUCTIONS: dict[str, Any] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
}
DTYPES = ("float32", "float64", "int64")


def _of(rank: int) -> list[float]:
    """Return what a rank contributes; no two ranks alike, no order preserved by chance."""
    return [float((3 * rank + 1) % 5 + 1), float(-2 * rank), float(10 + rank)]


@check("collectives/all_reduce")
def _all_reduce(probe: Probe) -> dict[str, Any]:
    """all_reduce returns the mean, sum, max or min over all ranks in a new tensor.

    Integers keep all their digits, also in all_reduce_ints. Scalars, bools, bfloat16, float64,
    tensors that are not contiguous and losses with a gradient keep shape and dtype.
    """
    ranks = probe.lite().ranks
    told: dict[str, Any] = {}
    for op in REDUCTIONS:
        for dtype in DTYPES:
            own = torch.tensor(_of(probe.rank)).to(getattr(torch, dtype))
            before = own.clone()
            reduced = ranks.all_reduce(own, op)  # type: ignore[arg-type]
            told[f"{op} of {dtype}"] = reduced.double().tolist()
            told.setdefault("changed", []).append(not torch.equal(own, before))
    large = ranks.all_reduce(torch.tensor([LARGE, LARGE * probe.rank]), "sum")
    told["large"] = large.tolist()
    grid = torch.tensor(_of(probe.rank)).repeat(2, 1)
    told["kinds"] = {
        what: _described(ranks.all_reduce(own, op))  # type: ignore[arg-type]
        for what, own, op in (
            ("a scalar", torch.tensor(float(probe.rank)), "sum"),
            ("a tensor that is not contiguous", grid.t(), "sum"),
            ("bfloat16", grid[0].bfloat16(), "sum"),
            ("bools", torch.tensor([probe.rank == 0, False, True]), "max"),
            ("float64", torch.tensor([probe.rank + 1 / 3], dtype=torch.float64), "max"),
            ("large integers", torch.tensor([LARGE + 2 * probe.rank]), "max"),
            ("a loss", torch.ones((), requires_grad=True) * probe.rank, "sum"),
        )
    }
    for op in ("sum", "max", "min"):
        own_numbers = [*map(int, _of(probe.rank)), LARGE + probe.rank]
        told[f"numbers: {op}"] = ranks.all_reduce_ints(own_numbers, op)  # type: ignore[arg-type]
    return told


def _described(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape and values of a tensor."""
    return [str(tensor.dtype), list(tensor.shape), tensor.detach().flatten().tolist()]


@judge_of(_all_reduce)
def _judge_reductions(found: Result) -> None:
    world = len(found.ranks)
    columns = list(zip(*(_of(rank) for rank in range(world)), strict=True))
    sums = [sum(column) for column in columns]
    kinds = {
        "a scalar": ["torch.float32", [], [float(sum(range(world)))]],
        "a tensor that is not contiguous": [
            "torch.float32",
            [3, 2],
            [value for value in sums for _ in range(2)],
        ],
        "bfloat16": ["torch.bfloat16", [3], sums],
        "bools": ["torch.bool", [3], [True, False, True]],
        "float64": ["torch.float64", [1], [world - 1 + 1 / 3]],
        "large integers": ["torch.int64", [1], [LARGE + 2 * (world - 1)]],
        "a loss": ["torch.float32", [], [float(sum(range(world)))]],
    }
    integers = [*([int(v) for v in c] for c in columns), [LARGE + rank for rank in range(world)]]
    for rank, told in enumerate(found.ranks):
        assert not any(told.pop("changed")), f"all_reduce changed the tensor of rank {rank}"
        large = told.pop("large")
        described = told.pop("kinds")
        for what, received in told.items():
            op = what.removeprefix("numbers: ").split()[0]
            if what.startswith("numbers"):
                exact = [REDUCTIONS[op](column) for column in integers]
                assert received == exact, (
                    f"all_reduce_ints({op!r}) returned {received} on rank {rank}, expected {exact}:"
                    " another reduction, or integers went through a floating-point dtype, which "
                    "has no room for their last digits"
                )
                continue
            expected = [float(REDUCTIONS[op](column)) for column in columns]
            assert close([float(value) for value in received], expected, 1e-6), (
                f"all_reduce({what}) returned {received} on rank {rank}, expected {expected}: "
                f"another reduction than {op!r}, or not over all ranks"
            )
        wanted = [LARGE * world, LARGE * sum(range(world))]
        assert large == wanted, (
            f"all_reduce(sum of int64) returned {large} on rank {rank}, expected {wanted}: "
            "integers went through a floating-point dtype, which has no room for their last digits"
        )
        for what, expected_kind in kinds.items():
            assert described[what] == expected_kind, (
                f"all_reduce of {what} returned dtype, shape and values {described[what]} on rank "
                f"{rank}, expected {expected_kind}"
            )


@check("collectives/all_gather")
def _all_gather(probe: Probe) -> dict[str, Any]:
    """all_gather stacks the tensors of all ranks in the order of ranks.

    Scalars and tensors that are not contiguous are stacked, and integers keep all their digits.
    With sync_grads=True, gradients flow through it.
    """
    ranks = probe.lite().ranks
    own = torch.tensor([_of(probe.rank)])
    with_gradient = torch.tensor(_of(probe.rank), requires_grad=True)
    gathered = ranks.all_gather(with_gradient, sync_grads=True)
    if gathered.requires_grad:
        torch.autograd.backward(gathered.square().sum())
    gradient = with_gradient.grad
    return {
        "gathered": ranks.all_gather(own).tolist(),
        "scalars": ranks.all_gather(torch.tensor(LARGE + probe.rank)).tolist(),
        "columns": ranks.all_gather(own.repeat(2, 1).t()).tolist(),
        "gradient": [] if gradient is None else gradient.tolist(),
    }


@judge_of(_all_gather)
def _judge_all_gather(found: Result) -> None:
    count = len(found.ranks)
    expected = [[_of(rank)] for rank in range(count)]
    for rank, told in enumerate(found.ranks):
        assert told["gathered"] == expected, (
            f"all_gather returned {told['gathered']} on rank {rank}, expected {expected}, in the "
            "order of ranks with shape (world_size, *shape)"
        )
        large = [LARGE + rank for rank in range(count)]
        assert told["scalars"] == large, (
            f"all_gather of an integer without a dimension returned {told['scalars']} on rank "
            f"{rank}, expected {large}: integers have to keep their dtype, and the result has the "
            "shape (world_size,)"
        )
        columns = [[[value, value] for value in _of(rank)] for rank in range(count)]
        assert told["columns"] == columns, (
            f"all_gather of a tensor that is not contiguous returned {told['columns']} on rank "
            f"{rank}, expected {columns}"
        )
        # Of the sum of squares on all ranks; or of this rank's alone, as autograd of torch has it.
        factor = ratio(told["gradient"], _of(rank)) if told["gradient"] else None
        assert factor is not None and abs(factor) > 1.9, (  # noqa: PT018
            f"all_gather(sync_grads=True): on rank {rank} the sum of squares of what it returned "
            f"has the gradient {told['gradient'] or None} with respect to {_of(rank)}, expected a "
            "multiple of that: gradients do not flow through it, as a contrastive loss needs them"
        )


@check("collectives/broadcast")
def _broadcast(probe: Probe) -> list[Any]:
    """All ranks receive the data of rank src from broadcast(data, src), for each src.

    Tuples, None, and integers as keys arrive as what they are.
    """
    ranks = probe.lite().ranks
    received = []
    for src in range(probe.world_size):
        own = {
            "rank": probe.rank,
            "values": torch.tensor(_of(probe.rank)),
            "more": [probe.rank] * 3,
        }
        data = ranks.broadcast(own, src)
        large = ranks.broadcast(torch.tensor([LARGE + src * (probe.rank == src)]), src)
        plain = ranks.broadcast({probe.rank: (1, "two", None, True, 0.5)}, src)
        received.append(
            [
                data["rank"],
                data["values"].tolist(),
                list(data["more"]),
                *large.tolist(),
                repr(plain),
            ]
        )
    return received


@judge_of(_broadcast)
def _judge_broadcast(found: Result) -> None:
    expected = [
        [src, _of(src), [src] * 3, LARGE + src, repr({src: (1, "two", None, True, 0.5)})]
        for src in range(len(found.ranks))
    ]
    for rank, received in enumerate(found.ranks):
        for src, (data, wanted) in enumerate(zip(received, expected, strict=True)):
            assert data == wanted, (
                f"broadcast(data, src={src}) returned the data of rank {data[0]} on rank {rank}"
                if data[0] != src
                else f"broadcast(data, src={src}) returned {data} on rank {rank}, expected {wanted}"
            )


@check("collectives/gather")
def _gather(probe: Probe) -> dict[str, Any]:
    """gather_objects returns the data of all ranks in the order of ranks.

    Sizes may differ between ranks. gather_bytes and scatter_bytes do not change the bytes,
    of which a rank may have none.
    """
    ranks = probe.lite().ranks
    uneven = torch.arange(float(2 * probe.rank + 1)) + probe.rank
    gathered = ranks.gather_objects({"rank": probe.rank, "uneven": uneven, 3: (probe.rank, None)})
    own = bytes([65 + probe.rank]) * (2 * probe.rank)  # empty on rank 0
    to_zero = ranks.gather_bytes(own)
    handed = [b"part %d" % rank for rank in range(probe.world_size)]
    return {
        "gathered": [
            [each["rank"], each["uneven"].tolist(), repr(each.get(3))] for each in gathered
        ],
        "bytes": [each.decode() for each in to_zero],
        "part": ranks.scatter_bytes(handed if ranks.is_global_zero else []).decode(),
    }


@judge_of(_gather)
def _judge_gather(found: Result) -> None:
    count = len(found.ranks)
    expected = [
        [r, [float(r + i) for i in range(2 * r + 1)], repr((r, None))] for r in range(count)
    ]
    for rank, told in enumerate(found.ranks):
        assert told["gathered"] == expected, (
            f"gather_objects returned {told['gathered']} on rank {rank}, expected {expected}: in "
            "the order of ranks, tensors of different lengths as they are"
        )
        wanted = [chr(65 + r) * (2 * r) for r in range(count)] if rank == 0 else []
        assert told["bytes"] == wanted, (
            f"gather_bytes returned {told['bytes']} on rank {rank}, expected {wanted}"
        )
        assert told["part"] == f"part {rank}", (
            f"scatter_bytes returned {told['part']!r} on rank {rank}, expected 'part {rank}'"
        )


@check("collectives/barrier")
def _barrier(probe: Probe) -> dict[str, list[bool]]:
    """A barrier returns after every rank has called it."""
    lite = probe.lite()
    waited = []
    for late in range(probe.world_size):
        came = probe.folder / f"came.{late}"
        if probe.rank == late:
            time.sleep(0.1)
            came.touch()
        lite.ranks.barrier("of the conformance kit")
        waited.append(came.exists())
        probe.meet(f"barrier.{late}")
    return {"ranks.barrier": waited}


@judge_of(_barrier)
def _judge_barrier(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        for name, waited in told.items():
            assert all(waited), (
                f"{name}() returned on rank {rank} before rank {waited.index(False)} had come: "
                "there is no barrier"
            )


TOGETHER = (_all_reduce, _all_gather, _broadcast, _gather, _barrier)


@check("collectives/three ranks", ranks=3)
def _of_three(probe: Probe) -> dict[str, Any]:
    """The five checks above pass on three ranks. On two ranks, two errors may cancel out."""
    return {each.name: each.run(probe) for each in TOGETHER}


@judge_of(_of_three)
def _judge_three(found: Result) -> None:
    for each in TOGETHER:
        CHECKS[each.name].judge(replace(found, ranks=[told[each.name] for told in found.ranks]))


@check("collectives/no_sync")
def _no_sync(probe: Probe) -> dict[str, Any]:
    """A backward pass in no_sync(prepared) communicates no gradients.

    This holds after another no_sync(prepared) inside it has ended. If no_sync returns None, no
    backward pass communicates, unless an engine takes the steps.
    """
    learner = Learner("dense", "sgd")
    trainer = probe.fit(learner, 8)
    strategy, prepared = trainer.strategy, trainer.run.require_prepared()
    context = strategy.no_sync(prepared)
    # Ranks with the same batches communicate more than gradients. An engine has a way of its own to
    # accumulate, and does not drop gradients.
    can, shares_batches = strategy.capabilities, probe.target.data_groups < probe.world_size
    if not can.manual_backward or (context is None and (shares_batches or can.engine_steps)):
        return {"held": None}
    # As the accumulation of the Trainer does it: forward and backward in the context.
    batch = next(iter(probe.loader(8)))
    inputs = batch[1].to(strategy.device)

    def held() -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            output = prepared.module("predict_step", (None, inputs), 0)
            strategy.backward(prepared, output.square().mean())
        return sorted({event.name for event in seen.events() or () if _reduces(event.name)})

    if context is None:
        told = {"held": None, "never held": held()}
        prepared.clear_gradients[0]()
        return told
    with context:
        first = held()
        with strategy.no_sync(prepared) or nullcontext():
            pass
        told = {"held": first, "held after an inner one": held()}
    prepared.clear_gradients[0]()
    return told


def _reduces(name: str) -> bool:
    # As torch.distributed's dispatcher names them, whatever the backend.
    return name.startswith("c10d::") and ("allreduce" in name or "reduce_scatter" in name)


@judge_of(_no_sync)
def _judge_no_sync(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert not told["held"], (
            f"a backward pass within no_sync(prepared) communicated gradients on rank {rank} "
            f"({', '.join(told['held'])}): each micro-batch that is accumulated pays for it"
        )
        always = told.get("never held")
        assert not always, (
            f"no_sync(prepared) returned None, and a backward pass communicated on rank {rank} "
            f"({', '.join(always)}): each micro-batch that is accumulated pays for it. Override "
            "no_sync to return a context in which backward does not communicate"
        )
        inner = told.get("held after an inner one")
        assert not inner, (
            f"a backward pass within no_sync(prepared) communicated gradients on rank {rank} "
            f"({', '.join(inner)}) once another no_sync(prepared) within it had ended: put back "
            "what there was before, and not what is usual"
        )
