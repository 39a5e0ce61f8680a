"""The strategy that "auto" takes for a model that is too large for DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import ConfigurationError, format_size
from stratagem.launch import RunPlan
from stratagem.plan import probe_accelerator, resolve
from stratagem.strategies import StepMemory, Strategy

_DIVIDING = ("ddp_sharded", "fsdp_shard_grad_op", "fsdp", "fsdp_cpu_offload")
"""The strategies that are tried in this order; each holds less than the one before."""
_GATHERING = ("fsdp", "fsdp_cpu_offload")
"""Those that gather the parameters of layers."""


def plan_by_memory(
    plan: RunPlan, strategy: Strategy, module: nn.Module, build: Callable[[RunPlan], Strategy]
) -> RunPlan:
    """Return the plan of a strategy that divides the model, if a rank cannot hold it under DDP.

    The result uses the first strategy of `_DIVIDING` under which parameters, gradients, buffers and
    the state of an Adam optimizer fit into a device. Activations are unknown, and not counted. If
    the layers that fsdp gathers do not fit beside them, a mesh that divides each layer is taken,
    where stratagem-mesh is installed and the model has a plan of its layers. The plan stays if the
    memory of the device is unknown, or if no strategy fits.

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
    bytes_per_weight = strategy.precision.dtype.itemsize if converts else None
    need = _memory_to_train(module, bytes_per_weight)
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
            made = replace(chosen, request=request, strategy=replace(chosen.strategy, why=why))
            gathered = _gathered(module, bytes_per_weight) if name in _GATHERING else 0
            if held + gathered <= room:
                return made
            return _on_a_mesh(made, module, (held, gathered, room), build)
    build(plan)
    return plan


def _on_a_mesh(
    plan: RunPlan,
    module: nn.Module,
    sizes: tuple[int, int, int],
    build: Callable[[RunPlan], Strategy],
) -> RunPlan:
    """Return the plan of a mesh on which layers fit, or the given plan with the reason.

    Args:
        plan: the plan of a strategy that gathers layers.
        module: the model.
        sizes: bytes of a rank without a gathered layer, of the gathered layers, and in all.
        build: as for `plan_by_memory`.
    """
    held, gathered, room = sizes
    said = f"{plan.strategy.why}; the layers that it gathers take {format_size(gathered)} more"

    def explained(made: RunPlan, why: str) -> RunPlan:
        build(made)
        return replace(made, strategy=replace(made.strategy, why=f"{said}, {why}"))

    registry = get_registry()
    if not registry.has("strategy", "mesh"):
        return plan
    try:
        named = replace(plan.request, strategy="mesh", launcher=plan.launcher.name)
        chosen = resolve(named, registry)
    except ConfigurationError:
        return explained(plan, "and a mesh does not go with the other arguments")
    spec = chosen.strategy.spec
    assert isinstance(spec, StrategySpec)
    fits = partial(_fits, held, gathered, room)
    choose = getattr(spec.load(), "arguments_by_state", None)
    found = None if choose is None else choose(module, len(plan.devices), fits)
    if found is None:
        return explained(plan, "and no mesh is known to divide them: stratagem plan compares")
    arguments, reason = found
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    selected = replace(
        chosen.strategy,
        name=f"mesh({given})",
        source=replace(spec, init_args={**spec.init_args, **arguments}),
    )
    return explained(
        replace(chosen, request=plan.request, strategy=selected), f"and on a mesh {reason}"
    )


def _fits(held: int, gathered: int, room: int, share: float) -> bool:
    return held + share * gathered <= room


def _gathered(module: nn.Module, bytes_per_weight: int | None) -> int:
    """Return the bytes that FSDP gathers at a time: a layer, and parameters outside of layers."""
    layers = list(_layers(module))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    sizes = [_size(layer.parameters(), bytes_per_weight) for layer in layers]
    outside = (p for p in module.parameters() if id(p) not in inside)
    return _size(outside, bytes_per_weight) + max(sizes, default=0)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists of modules."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from module.children()
        return
    for child in module.children():
        yield from _layers(child)


def _size(parameters: Iterable[nn.Parameter], bytes_per_weight: int | None) -> int:
    return sum(p.numel() * (bytes_per_weight or p.element_size()) for p in parameters)


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
