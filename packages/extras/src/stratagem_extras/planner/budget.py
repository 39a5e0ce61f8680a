"""recompute_within: the activations to compute again, so that a model fits in a memory budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, format_size
from stratagem.strategies import Recompute, StepMemory, apply_activation_checkpointing
from stratagem_extras.planner.devices import parse_size
from stratagem_extras.planner.plan import Planner
from stratagem_extras.planner.simulation import SimulatedModel


@dataclass(frozen=True)
class RecomputePlan:
    """The choice of `recompute_within`, with its plan.

    Attributes:
        choice: the argument of `Trainer(activation_checkpointing=...)`; None: no recomputation.
        layers: the number of layers that compute their activations again.
        all_layers: the number of layers.
        peak: the planned bytes of a rank at its peak.
        without: the planned bytes without recomputation.
        flops: the floating-point operations that are computed again in a step, over all operations
            of a step without recomputation. Operations between matrix products count as 0.
    """

    choice: Recompute | None
    layers: int
    all_layers: int
    peak: int
    without: int
    flops: float


def recompute_within(
    model: Callable[[], nn.Module] | nn.Module,
    batch: Any,
    budget: float | str,
    *,
    strategy: str = "single_device",
    devices: int = 1,
    num_nodes: int = 1,
    device: str | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
) -> RecomputePlan:
    """Return the least recomputation with which a step of a model fits in a memory budget.

    Layers are the elements of ModuleLists and Sequentials. First, outputs between matrix products
    are computed again (`Recompute(keep="matmul")`), in as few layers as possible. If that is not
    enough in all layers, whole layers are computed again, also as few as possible.

    Args:
        model: a function that builds the model, or the model; no step is run.
        batch: a micro-batch of one rank; see `plan_memory`.
        budget: the memory of a device, in bytes or as "12GB". As in a plan, 90% is used.
        strategy: the name of the strategy; sizes of a mesh are written "mesh(tensor=2)".
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        device: a name from the table of devices, such as "H100"; by default this machine's.
        loss, optimizer, precision, accumulate_grad_batches: as for `plan_memory`.

    Raises:
        ConfigurationError: the budget cannot be met (the message has the smallest possible one), or
            the strategy cannot be planned.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stratagem_extras.planner.budget import recompute_within
        >>> def build():
        ...     layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        ...               for _ in range(4)]
        ...     return nn.Sequential(*layers)
        >>> plan = recompute_within(build, torch.zeros(4096, 64), "44MB")
        >>> plan.choice, plan.layers, plan.all_layers
        (Recompute(modules=True, keep='matmul', offload=False, share=0.75), 3, 4)
    """
    usable = int(StepMemory.USABLE * parse_size(budget))
    peaks: dict[tuple[str | None, int], tuple[int, int]] = {}
    all_layers = _count_layers(model)

    def choice(keep: str | None, count: int) -> Recompute | None:
        return Recompute(keep=keep, share=count / all_layers) if count else None

    def plan(keep: str | None, count: int) -> tuple[int, int]:
        """Return the bytes and the operations of a step."""
        if (keep, count) not in peaks:
            planner = Planner(
                model,
                batch,
                loss=loss,
                optimizer=optimizer,
                precision=precision,
                accumulate_grad_batches=accumulate_grad_batches,
                activation_checkpointing=choice(keep, count),
            )
            planned = planner.plan(
                devices=devices,
                num_nodes=num_nodes,
                device=device,
                device_memory=budget,
                strategies=[strategy],
                expand=False,
            )
            row = next(iter(planned.strategies), None)
            if row is None or row.memory is None or not planner.has_activations:
                why = row.why_not if row is not None else f"it is not for {devices} device(s)"
                why = why or " ".join(planner.notes)
                raise ConfigurationError(
                    f"the activations of strategy={strategy!r} cannot be planned: {why}"
                )
            peaks[keep, count] = row.on_device, row.memory.flops
        return peaks[keep, count]

    without, flops = plan(None, 0)
    if without <= usable:
        return RecomputePlan(None, 0, all_layers, without, without, 0.0)
    for keep in ("matmul", None) if all_layers else ():
        if plan(keep, all_layers)[0] > usable:
            continue
        low, high = 0, all_layers
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if plan(keep, middle)[0] <= usable else (middle, high)
        peak, more = plan(keep, high)
        again = max(0.0, more / flops - 1) if flops else 0.0
        return RecomputePlan(choice(keep, high), high, all_layers, peak, without, again)
    least = min(peak for peak, _ in peaks.values())
    ways = "fewer samples in a micro-batch, or a strategy that divides the model, such as 'fsdp'"
    layers = "" if all_layers else " The model has no ModuleList or Sequential of layers."
    raise ConfigurationError(
        f"the budget {budget!r} cannot be met under strategy={strategy!r}: a step holds at least "
        f"{format_size(least)}, which takes a budget of {_budget_of(least)} bytes.{layers} "
        f"Take {ways}"
    )


def _budget_of(peak: int) -> int:
    """Return the smallest budget of which a plan may use so many bytes."""
    return -int(-peak // StepMemory.USABLE)


def _count_layers(model: Callable[[], nn.Module] | nn.Module) -> int:
    """Return the number of layers that activation checkpointing chooses by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = SimulatedModel(model)
        with made.mode:
            return len(apply_activation_checkpointing(made.model, True))
