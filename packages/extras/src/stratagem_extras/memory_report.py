"""What holds the memory of a device that is full, and what would fit: the text of the error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.accelerators import DeviceMemory
from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import format_size
from stratagem.strategies import StepMemory, Strategy

_UNITS = {"b": 1, "K": 2**10, "M": 2**20, "G": 2**30}
# Some versions of torch write MB for MiB on Metal.
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]i?B)")

_REST = "the rest: activations, inputs and what kernels work with"


def memory_report(
    error: BaseException,
    strategy: Strategy,
    memory: DeviceMemory,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
) -> str:
    """Return the memory use of a device and settings that would fit; for an out-of-memory error.

    Args:
        error: the device's error. Its message may contain the number of requested bytes.
        strategy: the strategy of the run.
        memory: the state of the device.
        module: the model.
        optimizers: the optimizers of the model.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.accelerators import DeviceMemory, memory_report
        >>> memory = DeviceMemory(2**20, 2**19, 2**19, 2**19, ())
        >>> lite, net = Lite(accelerator="cpu"), torch.nn.Linear(8, 8)
        >>> lite.launch()
        >>> report = memory_report(RuntimeError("full"), lite.strategy, memory, net, [])
        >>> report.partition(".")[0]
        ': the device has 1'
    """
    requested = _requested(error)
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
    return "\n".join(lines)


def _requested(error: BaseException) -> int:
    """Return how many bytes could not be had, as far as the error says it."""
    found = _REQUEST.search(str(error))
    return int(float(found[1]) * _UNITS[found[2][0]]) if found else 0


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


def what_would_fit(
    need: StepMemory,
    capacity: int,
    specs: Iterable[StrategySpec],
    *,
    ranks: int,
    micro_batches: int = 1,
) -> list[str]:
    """Return suggestions that make training fit into a device's memory, a line each.

    Args:
        need: the memory of a process that trains the model alone.
        capacity: the bytes that this process can use on the device.
        specs: the strategies that run on the device. Of strategies that shard and offload the same
            parts, only the first is named.
        ranks: the number of available devices.
        micro_batches: the current number of micro-batches in an optimizer step.

    Example:
        >>> gib = 2**30
        >>> need = StepMemory(gib, gib, 2 * gib, 0, 4 * gib)
        >>> what_would_fit(need, 7 * gib, (), ranks=1)
        ['a batch of 1/2 the size with accumulate_grad_batches=2: about 6.00 GiB']
    """
    lines = []
    known = set()
    for spec in specs:
        alike = spec.shards, spec.offloads
        helps = spec.offloads or (spec.shards and ranks > 1)
        if not helps or alike in known:
            continue
        known.add(alike)
        if (held := need.on_device(spec, ranks)) <= capacity:
            where = f" with devices={ranks}" if ranks > 1 else ""
            lines.append(f"strategy={spec.name!r}{where}: about {format_size(held)}")
    fixed = need.parameters + need.gradients + need.optimizer + need.buffers
    for parts in (2, 4, 8, 16, 32, 64):
        if (held := fixed + need.working // parts) <= capacity:
            lines.append(
                f"a batch of 1/{parts} the size with accumulate_grad_batches="
                f"{micro_batches * parts}: about {format_size(held)}"
            )
            break
    return lines
