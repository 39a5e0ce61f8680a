"""A whole state from an engine's partitions, and back: names and shapes are those of one process.

An engine keeps, for each group of parameters, one flat float32 tensor that the ranks share, and an
optimizer state for it. A rank's piece of a parameter is a range of the parameter's elements in
memory order. Rank 0 receives one tensor at a time; each rank takes its pieces of a whole state
without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem.interfaces.optimizer_state import load_named_state, load_weights, named_state
from stratagem_deepspeed.config import stage_of
from stratagem_deepspeed.engine import EngineModule

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Prepared, Strategy

_FLATS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1, bfloat16 with gradients added up in float32
)


# -- the model


def model_state(strategy: Strategy, prepared: Prepared) -> dict[str, Any]:
    """Return whole parameters and buffers on rank 0, on the CPU, copied; {} on other ranks.

    Trained parameters are the optimizer's float32 ones.
    """
    whole: dict[str, Any] = {}
    called = _called(prepared)
    trained = _trained(called)
    names = _shared_names(prepared.original)
    for name, tensor in _state_tensors(prepared.original):
        first = names.get(name, name)
        if first != name and first in whole:
            whole[name] = whole[first]  # a tied parameter, gathered before
            continue
        if not isinstance(tensor, Tensor):
            gathered: Any = tensor
        elif id(tensor) in trained:
            gathered = _gather(tensor, _piece_of_weights(called, tensor), strategy.device)
        else:
            gathered = _whole(tensor)
        # Other ranks note that it was gathered, and keep nothing.
        whole[name] = gathered if strategy.is_global_zero else None
    return whole if strategy.is_global_zero else {}


def load_model_state(prepared: Prepared, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole parameters, which every rank has; each takes its pieces."""
    called = _called(prepared)
    if called.engine is None and not any(
        hasattr(p, "ds_tensor") for p in prepared.original.parameters()
    ):
        load_weights(prepared.original, saved, strict=strict)
        return
    _check_weights(prepared.original, saved, strict=strict)
    trained = _trained(called)
    for name, tensor in _state_tensors(prepared.original):
        if name not in saved or not isinstance(tensor, Tensor):
            continue
        if id(tensor) in trained:
            _put_weights(called, tensor, saved[name])
        elif hasattr(tensor, "ds_tensor"):
            _put_sharded(tensor, saved[name])
        else:
            with torch.no_grad():
                tensor.copy_(saved[name])
    if trained:
        _publish(called)


# -- the optimizer


def optimizer_state(strategy: Strategy, prepared: Prepared, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state by parameter names: whole on rank 0, without tensors on other ranks."""
    called = _called(prepared)
    if called.engine is None:
        raise ConfigurationError(
            "the engine's optimizer state is gone: another Trainer has begun a run in this process "
            "since, which freed it. Save before that"
        )
    if stage_of(called.config) == 0:
        return named_state(optimizer, prepared.original)
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": list(names)}
        for group, names in zip(optimizer.param_groups, called.groups, strict=True)
    ]
    inner = called.engine.optimizer
    _relink(inner)
    step, keys = _step_and_keys(strategy, inner)
    parameters = dict(prepared.original.named_parameters())
    state: dict[str, Any] = {}
    if step is not None:
        for name in (name for names in called.groups for name in names):
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            entry: dict[str, Any] = {"step": torch.tensor(step)}
            for key in keys:
                piece = _piece_of_state(called, parameter, key)
                entry[key] = _gather(parameter, piece, strategy.device)
            state[name] = entry
    return {"state": state if strategy.is_global_zero else {}, "param_groups": groups}


def load_optimizer_state(
    prepared: Prepared, optimizer: Optimizer, saved: Mapping[str, Any]
) -> None:
    """Load whole state, which every rank has; each takes its pieces."""
    called = _called(prepared)
    assert called.engine is not None
    if stage_of(called.config) == 0:
        load_named_state(optimizer, prepared.original, saved)
        return
    for group, names in zip(optimizer.param_groups, called.groups, strict=True):
        group.update(_matching_group(names, saved["param_groups"]))
    entries = saved["state"]
    if not entries:
        return
    inner = called.engine.optimizer
    some = next(iter(entries.values()))
    keys = [key for key, value in some.items() if isinstance(value, Tensor) and key != "step"]
    _make_states(inner, float(some.get("step", 0)), keys)
    parameters = dict(prepared.original.named_parameters())
    for name, entry in entries.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.requires_grad:
            for key in keys:
                _put_state(called, parameter, key, entry[key])


# -- names and parameters


def _called(prepared: Prepared) -> EngineModule:
    called = prepared.module
    assert isinstance(called, EngineModule)
    return called


def _state_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a state dict has, with the parameters themselves in it."""
    yield from module.state_dict(keep_vars=True).items()


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by the others."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in _state_tensors(module)}


def _trained(called: EngineModule) -> set[int]:
    """Return the ids of the parameters of which the engine's optimizer has float32 ones."""
    if called.engine is None or not called.groups or stage_of(called.config) == 0:
        return set()
    names = {name for group in called.groups for name in group}
    return {
        id(parameter)
        for name, parameter in called.module.named_parameters()
        if name in names and parameter.requires_grad
    }


def _check_weights(module: nn.Module, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse weights of another model, whose shapes here are those of sharded parameters."""
    own = {
        name: tuple(getattr(value, "ds_shape", value.shape))
        for name, value in _state_tensors(module)
        if isinstance(value, Tensor)
    }
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own and isinstance(saved[name], Tensor)]
    shapes = [
        f"{name} {tuple(saved[name].shape)} (the model has {shape})"
        for name, shape in own.items()
        if name in saved and tuple(saved[name].shape) != shape
    ]
    problems = []
    if strict and missing:
        problems.append(f"it lacks {', '.join(missing[:5])}")
    if strict and unexpected:
        problems.append(f"it has {', '.join(unexpected[:5])}, which the model lacks")
    if shapes:
        problems.append(f"these have another shape: {', '.join(shapes[:5])}")
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint belongs to another model: {'; '.join(problems)}. Build the model that "
            "it was saved from, or load with strict=False to skip names that do not match"
        )


def _matching_group(names: list[str], saved: list[Mapping[str, Any]]) -> dict[str, Any]:
    for group in saved:
        if sorted(group["params"]) == sorted(names):
            return {key: value for key, value in group.items() if key != "params"}
    there = "; ".join(", ".join(group["params"][:5]) for group in saved)
    raise CheckpointMismatchError(
        f"the checkpoint's optimizer has no parameter group of {', '.join(names[:5])}; its groups "
        f"are {there or 'none'}: use the optimizer and the parameter groups that it was saved with"
    )


# -- this rank's pieces


def _stage_3_range(parameter: Any) -> tuple[int, int]:
    size = -(-parameter.ds_numel // dist.get_world_size(parameter.ds_process_group))
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


Piece = tuple[int, Tensor] | None
"""Where a piece begins in its parameter, and its elements; None: this rank has none."""


def _piece_of_weights(called: EngineModule, parameter: Any) -> Piece:
    return _piece(
        called, parameter, lambda f: f.hp_fragment, lambda o, p: o.get_local_fp32_param(p)
    )


def _piece_of_state(called: EngineModule, parameter: Any, key: str) -> Piece:
    return _piece(
        called,
        parameter,
        lambda f: f.get_optim_state_fragment(key),
        lambda o, p: o.get_local_fp32_param(p, key),
    )


def _piece(
    called: EngineModule,
    parameter: Any,
    of_fragment: Callable[[Any], Tensor],
    of_stage_3: Callable[[Any, Any], Tensor],
) -> Piece:
    if stage_of(called.config) == 3:
        start, count = _stage_3_range(parameter)
        return (start, of_stage_3(called.engine.optimizer, parameter)[:count]) if count else None
    fragment = parameter._hp_mapping
    if fragment is None:
        return None
    return fragment.lp_fragment_address.start, of_fragment(fragment)


def _gather(parameter: Any, piece: Piece, device: torch.device) -> Tensor:
    """Return a whole parameter, or its state, on rank 0; each rank adds its piece to zeros."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
    if piece is not None:
        start, elements = piece
        whole[start : start + elements.numel()] = elements.to(device)
    dist.reduce(whole, 0)
    return whole.view(shape).cpu()


def _whole(tensor: Any) -> Tensor:
    """Return a whole copy of a buffer or a parameter that is not trained."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach().to("cpu", copy=True)  # type: ignore[no-any-return]
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([tensor]):
        return tensor.detach().to("cpu", copy=True)  # type: ignore[no-any-return]


def _put_weights(called: EngineModule, parameter: Any, whole: Tensor) -> None:
    if stage_of(called.config) == 3:
        called.engine.optimizer.set_local_hp_param(_stage_3_piece(parameter, whole), parameter)
    elif parameter._hp_mapping is not None:
        fragment = parameter._hp_mapping
        fragment.hp_fragment.data.copy_(_range(fragment, whole))


def _put_state(called: EngineModule, parameter: Any, key: str, whole: Tensor) -> None:
    if stage_of(called.config) == 3:
        piece = _stage_3_piece(parameter, whole)
        called.engine.optimizer.set_local_hp_param(piece, parameter, key)
    elif parameter._hp_mapping is not None:
        fragment = parameter._hp_mapping
        fragment.get_optim_state_fragment(key).data.copy_(_range(fragment, whole))


def _range(fragment: Any, whole: Tensor) -> Tensor:
    address = fragment.lp_fragment_address
    return whole.reshape(-1)[address.start : address.start + address.numel]


def _stage_3_piece(parameter: Any, whole: Tensor) -> Tensor:
    start, count = _stage_3_range(parameter)
    piece = torch.zeros(
        parameter.ds_tensor.ds_numel, dtype=torch.float32, device=parameter.ds_tensor.device
    )
    piece[:count] = whole.reshape(-1)[start : start + count]
    return piece


def _put_sharded(parameter: Any, whole: Tensor) -> None:
    """Put a whole tensor into a sharded parameter that is not trained."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.data.copy_(whole)


def _publish(called: EngineModule) -> None:
    """Bring the optimizer's float32 weights into the model, which forward reads."""
    inner = called.engine.optimizer
    if stage_of(called.config) != 3:
        inner.update_lp_params()
        return
    # Small parameters stay gathered between steps: they would keep their old values.
    called.engine.empty_partition_cache()
    for index, flat in enumerate(inner.fp32_partitioned_groups_flat):
        if flat.numel():
            inner.fp16_partitioned_groups_flat[index].data.copy_(flat.data)


# -- the optimizer's state as a whole


def _flats(inner: Any) -> list[Tensor]:
    flats = next(getattr(inner, name) for name in _FLATS if hasattr(inner, name))
    return [flat for flat in flats if flat.numel()]


def _relink(inner: Any) -> None:
    """Let parameters find their state, which DeepSpeed links after the first group's first step."""
    if hasattr(inner, "_hp_optimizer_states_linked"):
        inner._hp_optimizer_states_linked = False
        inner._lazy_init_hp_params_optimizer_state()


def _step_and_keys(strategy: Strategy, inner: Any) -> tuple[float | None, list[str]]:
    """Return the steps so far, and what the optimizer keeps of each element; all ranks alike."""
    step, keys = -1.0, []
    for flat in _flats(inner):
        own = inner.optimizer.state.get(flat, {})
        if own:
            step = max(step, float(own.get("step", 0)))
            keys = [k for k, v in own.items() if isinstance(v, Tensor) and k != "step"]
            break
    found = strategy.gather_plain([step, keys])
    step = max(one[0] for one in found)
    keys = max((one[1] for one in found), key=len)
    return (None if step < 0 else step), keys


def _make_states(inner: Any, step: float, keys: list[str]) -> None:
    for flat in _flats(inner):
        own = inner.optimizer.state[flat]
        for key in keys:
            own.setdefault(key, torch.zeros_like(flat.data))
        in_torch = type(inner.optimizer).__module__.startswith("torch.")
        own["step"] = torch.tensor(step) if in_torch else int(step)
    _relink(inner)
