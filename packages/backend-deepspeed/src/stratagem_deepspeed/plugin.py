"""What this distribution offers for DeepSpeed: specs only, no torch and no SDK."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from stratagem.discovery import (
    Capabilities,
    Check,
    ComponentSpec,
    NameSpec,
    StrategySpec,
    hookimpl,
)

DEEPSPEED = Capabilities.parallel(
    precisions=("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"),
    engine_precisions=("bf16-mixed", "bf16-true", "16-mixed", "16-true"),
    engine_clips=True,
    engine_steps=True,
    sharded_state=True,
    checkpoint_io="directory",
    allows_uneven_eval=False,
    follows_evaluation=True,
    compiles=(),
)
"""What an engine can do: at stage 3 forward gathers parameters, so ranks run as many batches."""

_PRESETS: dict[str, tuple[str, dict[str, object]]] = {
    "deepspeed": ("ZeRO by DeepSpeed; stage 2, or as its config says", {}),
    "deepspeed_stage_1": ("ZeRO: optimizer state sharded", {"stage": 1}),
    "deepspeed_stage_2": ("ZeRO: gradients sharded too", {"stage": 2}),
    "deepspeed_stage_3": ("ZeRO: parameters sharded too", {"stage": 3}),
    "deepspeed_stage_1_offload": (
        "stage 1 with the optimizer in host memory",
        {"stage": 1, "offload_optimizer": True},
    ),
    "deepspeed_stage_2_offload": (
        "stage 2 with the optimizer in host memory",
        {"stage": 2, "offload_optimizer": True},
    ),
    "deepspeed_stage_3_offload": (
        "stage 3 with optimizer and parameters in host memory",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "deepspeed_stage_3_offload_nvme": (
        "stage 3 with optimizer and parameters on NVMe",
        {
            "stage": 3,
            "offload_optimizer": True,
            "offload_parameters": True,
            "offload_optimizer_device": "nvme",
            "offload_params_device": "nvme",
        },
    ),
}


_SHARDED_AT: dict[object, tuple[str, ...]] = {
    1: ("optimizer",),
    2: ("gradients", "optimizer"),
    3: ("parameters", "gradients", "optimizer"),
}
"""What each stage divides over the ranks."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the strategies: one class, with further presets; and the converter of checkpoints."""
    strategies = tuple(
        StrategySpec(
            name=name,
            target="stratagem_deepspeed.strategy:DeepSpeedStrategy",
            api_version=2,
            summary=summary,
            capabilities=DEEPSPEED,
            init_args=arguments,
            shards=_SHARDED_AT[arguments.get("stage", 2)],
            offloads=_offloads(arguments),
            # A plan counts NVMe offload as host memory.
            placement_arguments=("offload_optimizer_device", "offload_params_device"),
        )
        for name, (summary, arguments) in _PRESETS.items()
    )
    converter = NameSpec(
        name="stratagem.checkpoint.convert_zero_checkpoint_to_fp32_state_dict",
        target="stratagem_deepspeed.fp32_file:convert_zero_checkpoint_to_fp32_state_dict",
        api_version=2,
        summary="one file of float32 weights from a checkpoint that is a directory",
    )
    return (*strategies, converter)


def _offloads(arguments: dict[str, object]) -> tuple[str, ...]:
    """Return what lies in host memory; gradients go there with the optimizer that uses them."""
    parameters = ("parameters",) if arguments.get("offload_parameters") else ()
    rest = ("gradients", "optimizer") if arguments.get("offload_optimizer") else ()
    return parameters + rest


@hookimpl
def stratagem_doctor() -> Iterable[Check]:
    """Examine DeepSpeed, and the ops that can be built here."""
    # By name and here, since a listing of names does without it.
    found: Iterable[Check] = import_module("stratagem_deepspeed.doctor").checks()
    return found
