"""Device errors: who held the memory that is full, what would fit, and what a dead device means.

Computed once an error has ended a step, a set-up or an evaluation, so that a good one pays nothing.
The error stays the object that was raised, so that whoever catches it goes on catching it; its
message says more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.discovery.registry import get_registry
from stratagem.discovery.specs import StrategySpec
from stratagem.errors import format_size, with_explanation
from stratagem.interfaces.accelerator import DeviceMemory
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.rank import this_rank
from stratagem.launch.stack import line_in_traceback
from stratagem.plan.memory import StepMemory, what_would_fit

_UNITS = {"b": 1, "K": 2**10, "M": 2**20, "G": 2**30}
# Some versions of torch write MB for MiB on Metal.
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]i?B)")

_REST = "the rest: activations, inputs and what kernels work with"
_BESIDES = (
    "Besides: precision='bf16-mixed' halves most activations, and strategies with "
    "activation_checkpointing= compute them again in place of keeping them"
)


def raise_explained(error: RuntimeError, strategy: Strategy, prepared: PreparedModel) -> NoReturn:
    """Raise an error of one part of a step: the better one that the strategy knows, or itself.

    Under Lite, whose user may catch it. Raises:
        StratagemError: the strategy knows what was wrong.
        RuntimeError: the error, in which a device's own errors are explained.
    """
    explained = strategy.explain(prepared, error)
    if explained is not None:
        raise explained from error
    explain_device_error(error, strategy, prepared.original, prepared.optimizers)
    raise error


def explain_device_error(
    error: BaseException,
    strategy: Strategy,
    module: nn.Module | None,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Add an explanation to an error of the device; leave other errors unchanged.

    Args:
        error: the error of a step, a setup or an evaluation.
        strategy: the strategy of the run.
        module: the model, or None before it exists.
        optimizers: the optimizers of the model.
    """
    if getattr(error, "_stratagem_explained", False) or not hasattr(strategy, "device"):
        return
    accelerator, ranks = strategy.accelerator, strategy.ranks
    who = f"rank {ranks.global_rank} of {ranks.world_size} ({strategy.device})"
    where = f"{who}, at {line_in_traceback(error)}"
    text = None
    if accelerator.is_out_of_memory(error):
        memory = accelerator.device_memory(strategy.device)
        text = f"{where}, is out of memory"
        if memory is not None and module is not None:
            text += _report(strategy, memory, module, optimizers, _requested(error))
        text = with_explanation(text, "out-of-memory")
    elif (advice := accelerator.explain_lost_device(error)) is not None:
        this_rank.device_is_lost = True
        text = f"{where}: {advice}"
        # Now, since a library of the device may end the process before the error is shown.
        print(f"stratagem: {text}", file=sys.stderr, flush=True)
    if text is not None:
        error.args = (f"{error}\n\n{text}",)
        error._stratagem_explained = True  # type: ignore[attr-defined]


def _requested(error: BaseException) -> int:
    """Return how many bytes could not be had, as far as the error says it."""
    found = _REQUEST.search(str(error))
    return int(float(found[1]) * _UNITS[found[2][0]]) if found else 0


def _report(
    strategy: Strategy,
    memory: DeviceMemory,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    requested: int,
) -> str:
    """Return who holds the device's memory, and what would fit."""
    kind = strategy.device.type
    parameters = list(module.parameters())
    own = {id(parameter) for parameter in parameters}
    held = {
        "parameters": _bytes(parameters, kind),
        "gradients": _bytes((p.grad for p in parameters if p.grad is not None), kind),
        "optimizer state": _bytes(_state(optimizers, own), kind),
        "buffers": _bytes(module.buffers(), kind),
    }
    rest = max(0, memory.peak - sum(held.values()))
    trained = _bytes((p for p in parameters if p.requires_grad), kind)
    state = int(trained * _state_per_weight(optimizers))
    # Of a rank; "gradients" and "optimizer state" are there from the first step on.
    in_first_step = any(0 < len(o.state) < len(o.param_groups[0]["params"]) for o in optimizers)
    made = held["optimizer state"] if not in_first_step else 0
    whole = {**held, "gradients": trained, "optimizer state": made or state}
    held[_REST], whole[_REST] = rest, rest + requested
    has = "" if memory.total is None else f": the device has {format_size(memory.total)}"
    lines = [
        f"{has}. This process held {format_size(memory.peak)} at most, and a whole step takes "
        f"about {format_size(sum(whole.values()))}:"
    ]
    for what, size in held.items():
        lines.append(f"  {format_size(size):>10}  {format_size(whole[what]):>10}  {what}")
    if requested:
        lines.append(f"  {format_size(requested):>10}  more was asked for")
    unused = memory.reserved - memory.allocated
    if unused > memory.reserved // 4:
        lines.append(f"  {format_size(unused):>10}  of what torch has reserved is free, in pieces")
    lines += [f"{who}: {format_size(size)}" for who, size in memory.others]
    if memory.total is not None:
        capacity = memory.total - sum(size for _, size in memory.others)
        if sum(whole.values()) < capacity:
            capacity = memory.peak  # this process is limited to less than the device has
        weights = sum(_whole_bytes(p) for p in parameters)  # of all ranks
        gradients = sum(_whole_bytes(p) for p in parameters if p.requires_grad)
        moments = int(gradients * _state_per_weight(optimizers))
        need = StepMemory(weights, gradients, moments, held["buffers"], rest + requested)
        lines += _advice(strategy, need, capacity)
    return "\n".join(filter(None, (*lines, _BESIDES, strategy.accelerator.memory_advice)))


def _advice(strategy: Strategy, need: StepMemory, capacity: int) -> list[str]:
    ranks = max(strategy.ranks.world_size, len(strategy.accelerator.availability().free))
    step = strategy.components.step
    fitting = what_would_fit(
        need,
        capacity,
        _strategies_for(strategy.accelerator.name),
        ranks=ranks,
        micro_batches=1 if step is None else step.most_micro_batches,
    )
    if not fitting:
        return [f"By this estimate nothing that is installed here would fit on {ranks} device(s)"]
    return ["What would fit, by an estimate:", *(f"  {line}" for line in fitting)]


def _strategies_for(accelerator: str) -> Iterable[StrategySpec]:
    for candidate in get_registry().candidates("strategy"):
        spec = candidate.spec
        if isinstance(spec, StrategySpec):
            runs_on = spec.capabilities.accelerators
            if runs_on is None or accelerator in runs_on:
                yield spec


def _whole_bytes(parameter: Any) -> int:
    # Of a DTensor, numel() is the whole; DeepSpeed keeps the whole's beside an empty tensor.
    return int(getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size())


def _state_per_weight(optimizers: Sequence[Optimizer]) -> float:
    """Return how many numbers an optimizer keeps for each weight; before its first step a guess."""
    for optimizer in optimizers:
        for parameter, state in _entries(optimizer):
            size = _on_this_rank(parameter).numel()
            kept = [_on_this_rank(v) for v in state.values() if isinstance(v, Tensor)]
            if size and kept:
                return float(sum(tensor.numel() for tensor in kept) / size)
    defaults = optimizers[0].defaults if optimizers else {}
    return 2.0 if "betas" in defaults else float(bool(defaults.get("momentum")))


def _entries(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """Return the parameters that have state, each with its own; other keys are passed over."""
    return [(key, state) for key, state in optimizer.state.items() if isinstance(key, Tensor)]


def _state(optimizers: Sequence[Optimizer], own: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of the state, and weights that are the optimizer's alone."""
    for optimizer in optimizers:
        for _, state in _entries(optimizer):
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in own)


def _bytes(tensors: Iterable[Tensor], kind: str) -> int:
    """Return what tensors take on devices of a kind; what shares memory counts once."""
    sizes = {}
    for tensor in map(_on_this_rank, tensors):
        if tensor.device.type == kind:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _on_this_rank(tensor: Any) -> Any:
    """Return the part of a tensor that is here."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach() if isinstance(local, torch.Tensor) else tensor
