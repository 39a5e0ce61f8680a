"""The optimizer that an engine steps: the user's, or DeepSpeed's own where offload needs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from stratagem.errors import ConfigurationError
from stratagem_deepspeed.config import offload_device, stage_of
from stratagem_deepspeed.library import is_simulated, simulated_kernels

FORCE = "zero_force_ds_cpu_optimizer"
UNTESTED = "zero_allow_untested_optimizer"

_WHOLE_TENSORS = ("Adafactor", "AdamW8bit", "LBFGS", "Muon", "SparseAdam")
"""Optimizers whose step looks at a parameter's shape, at all of them, or at sparsity."""

_UNSUPPORTED = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
}
"""Options of torch's Adam that DeepSpeedCPUAdam lacks, and the values that it can stand in for."""


def only_one(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return the optimizer, or None without optimizers.

    Raises:
        ConfigurationError: several optimizers are passed.
    """
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigurationError(
            f"a DeepSpeed engine steps one optimizer, received {len(optimizers)} ({kinds}): give "
            "one optimizer several parameter groups, set up a model for each under Lite, or pass "
            "strategy='fsdp', which takes several"
        )
    return optimizers[0] if optimizers else None


def check_held(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer has parameters that its engine's model does not have.

    Raises:
        ConfigurationError: the message has the number of such parameters, and the remedy.
    """
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    others = sum(id(parameter) not in own for parameter in held)
    if others:
        raise ConfigurationError(
            "a DeepSpeed engine steps an optimizer whose parameters are all in its model, received "
            f"{type(optimizer).__name__} with {others} of {len(held)} parameters of other models: "
            "make one optimizer for each model and call lite.setup(model, optimizer) for each, or "
            "set up one module that holds all models"
        )


def check_elementwise(optimizer: Optimizer, config: Mapping[str, Any]) -> None:
    """Refuse an optimizer whose update is wrong on DeepSpeed's flat partitions.

    A step sees one flat tensor in the place of a group's parameters, or a slice of it, so that only
    what treats each element by itself stays what it is.
    """
    kind = type(optimizer)
    if stage_of(config) == 0 or UNTESTED in config:
        return
    if kind.__module__.startswith(("torch.optim", "stratagem_extras.")):
        if kind.__name__ in _WHOLE_TENSORS:
            library = "torch.optim" if kind.__module__.startswith("torch.") else "stratagem_extras"
            raise ConfigurationError(
                f"{library}.{kind.__name__} steps whole tensors, and DeepSpeed steps flat slices "
                "of them: use an optimizer that treats each element by itself (AdamW, SGD, ...), "
                "or strategy='ddp'"
            )
    elif not kind.__module__.startswith(("deepspeed.", "apex.")):
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} is not known to treat each element by itself, "
            "and DeepSpeed steps flat slices of the parameters: if it does, pass "
            f'config={{"{UNTESTED}": True}}'
        )


def wants_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Whether the config offloads the optimizer so that DeepSpeedCPUAdam is needed."""
    return offload_device(config, "offload_optimizer") is not None and config.get(FORCE, True)


def wants_fused_adam(config: Mapping[str, Any]) -> bool:
    """Whether "Adam" or "AdamW" in a config means DeepSpeed's FusedAdam."""
    section = config.get("optimizer") or {}
    is_adam = str(section.get("type", "")).lower() in ("adam", "adamw")
    asked_for_torchs = section.get("params", {}).get("torch_adam", False)
    return is_adam and not asked_for_torchs and not wants_cpu_adam(config)


def use_torchs_adam(config: dict[str, Any]) -> None:
    """Let "Adam" and "AdamW" in a config mean torch's, where FusedAdam cannot be had.

    DeepSpeed would try to compile it in the ranks, for two minutes without a line.

    Args:
        config: the engine's; a key may be added.
    """
    if wants_fused_adam(config):
        config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)


def suited(optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
    """Return the optimizer for an engine with this config, and adapt the config.

    With an offloaded optimizer, torch's Adam and AdamW become DeepSpeedCPUAdam (the same numbers up
    to rounding, several times as fast), with the groups of the user's optimizer: its schedulers
    continue to work. Other optimizers are stepped unchanged.

    Args:
        optimizer: the optimizer of the user.
        config: the config of the engine; two keys may be added.

    Raises:
        ConfigurationError: the optimizer has taken a step, its `state_dict` has additional entries,
            or DeepSpeed cannot step it.
    """
    # In a simulation the optimizer is new, and its number of steps has no value to read.
    states = () if is_simulated() else optimizer.state.values()
    if any(float(state.get("step", 1)) for state in states if state):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} has the state of earlier steps, which DeepSpeed's "
            "engine would drop: set it up before its first step, and load a saved state "
            "afterwards, by Lite.load"
        )
    if own := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise ConfigurationError(
            f"the state_dict of {type(optimizer).__name__} has the entries {', '.join(own)} of its "
            "own, which a checkpoint of an engine cannot hold: use strategy='ddp', or keep them in "
            "param_groups"
        )
    check_elementwise(optimizer, config)
    config.setdefault(UNTESTED, True)
    if not wants_cpu_adam(config):
        config.setdefault(FORCE, False)
        return optimizer
    if type(optimizer).__module__.startswith("deepspeed."):
        return optimizer
    why_not = _why_not_cpu_adam(optimizer)
    if why_not:
        config[FORCE] = False
        _say(f"{why_not}, so the offloaded optimizer is stepped by torch on the CPU")
        return optimizer
    return _as_cpu_adam(optimizer)


def _why_not_cpu_adam(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind not in (Adam, AdamW):
        return f"DeepSpeed has no {kind.__name__} for the CPU"
    for group in optimizer.param_groups:
        for option, expected in _UNSUPPORTED.items():
            if group.get(option, expected) != expected:
                return f"DeepSpeedCPUAdam has no {option}={group[option]!r}"
    if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        return "DeepSpeedCPUAdam takes no tensor as learning rate"
    return ""


def _as_cpu_adam(optimizer: Optimizer) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # torch's AdamW is an Adam with this option since 2.7.
    decoupled = isinstance(optimizer, AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    with simulated_kernels() if is_simulated() else nullcontext():
        made: Optimizer = DeepSpeedCPUAdam(
            [{"params": group["params"]} for group in optimizer.param_groups],
            **{name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")},
            adamw_mode=decoupled,
        )
    for own, users in zip(made.param_groups, optimizer.param_groups, strict=True):
        users.update({key: value for key, value in own.items() if key not in users})
    # Both share one list of groups: a scheduler made for the user's optimizer acts on this one.
    made.param_groups = optimizer.param_groups
    # Else a scheduler warns that the user's optimizer was never stepped.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    _say(
        f"the offloaded optimizer is stepped by DeepSpeedCPUAdam in place of torch's "
        f"{type(optimizer).__name__}, with its options"
    )
    return made


def _say(what: str) -> None:
    if not is_simulated() and (not dist.is_initialized() or dist.get_rank() == 0):
        text = f'{what}; config={{"{FORCE}": False}} keeps torch\'s'
        if text not in _said:
            _said.add(text)
            print(f"stratagem: {text}", file=sys.stderr, flush=True)


_said: set[str] = set()
