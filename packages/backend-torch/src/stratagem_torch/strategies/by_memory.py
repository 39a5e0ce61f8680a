"""The strategy that "auto" takes for a model that is too large for DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import ConfigurationError, format_size
from stratagem.launch import RunPlan
from stratagem.plan import probe_accelerator, resolve
from stratagem.strategies import StepMemory, Strategy

_DIVIDING = ("ddp_sharded", "fsdp_shard_grad_op", "fsdp", "fsdp_cpu_offload")
"""The strategies that are tried in this order; each holds less than the one before."""


def plan_by_memory(
    plan: RunPlan, strategy: Strategy, module: nn.Module, build: Callable[[RunPlan], Strategy]
) -> RunPlan:
    """Return the plan of a strategy that divides the model, if a rank cannot hold it under DDP.

    The result uses the first strategy of `_DIVIDING` under which parameters, gradients, buffers and
    the state of an Adam optimizer fit into a device. Activations are unknown, and not counted. The
    plan stays if the memory of the device is unknown, or if no strategy fits.

    Args:
        plan: the plan with DDP.
        strategy: the strategy of the plan.
        module: the model.
        build: builds the strategy of another plan. The last call has the plan that is returned.

    Example:
        >>> import torch
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import plan_by_memory
        >>> runtime = Trainer(accelerator="cpu", devices=2, logger=False).runtime
        >>> small = torch.nn.Linear(2, 2)
        >>> plan_by_memory(runtime.plan, runtime.strategy, small, print) is runtime.plan
        True
    """
    found, request = probe_accelerator(plan.accelerator.source), plan.request
    if found.memory is None:
        return plan
    room = int(StepMemory.USABLE * found.memory / (1 if found.indexed else len(plan.devices)))
    converts = plan.precision.name.endswith("-true")
    need = _memory_to_train(module, strategy.precision.dtype.itemsize if converts else None)
    if (under_ddp := _on_device(need, plan, strategy)) <= room:
        return plan
    launcher = plan.launcher.name if request.interactive else request.launcher
    for name in _DIVIDING:
        try:
            chosen = resolve(replace(request, strategy=name, launcher=launcher), get_registry())
        except ConfigurationError:
            continue  # it does not go with something else that was asked for
        if (held := _on_device(need, chosen, build(chosen))) <= room:
            why = (
                f"{plan.strategy.name} would hold {format_size(under_ddp)} without "
                f"activations, {name} holds {format_size(held)}, and a rank has "
                f"{format_size(room)}"
            )
            return replace(chosen, request=request, strategy=replace(chosen.strategy, why=why))
    build(plan)
    return plan


def _memory_to_train(module: nn.Module, bytes_per_weight: int | None) -> StepMemory:
    """Return the memory of a process that trains a model alone, without activations.

    Since the optimizer is unknown yet, the result assumes two numbers for each weight, as in Adam.

    Args:
        module: the model. Parameters that it creates later are not counted.
        bytes_per_weight: the size of a floating-point weight in training. None: its current size.
    """
    whole = trained = 0
    for parameter in module.parameters():
        converted = bytes_per_weight if parameter.is_floating_point() else None
        size = parameter.numel() * (converted or parameter.element_size())
        whole += size
        trained += size if parameter.requires_grad else 0
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return StepMemory(whole, trained, 2 * trained, buffers, working=0)


def _on_device(need: StepMemory, plan: RunPlan, strategy: Strategy) -> int:
    """Return the bytes that a rank holds on its device, as the strategy estimates them."""
    spec = plan.strategy.spec
    assert isinstance(spec, StrategySpec)
    held = strategy.estimate_memory({"step": need}, spec.shards)["step"]
    host = strategy.accelerator.is_host
    return replace(held, **dict.fromkeys(() if host else spec.offloads, 0)).total
