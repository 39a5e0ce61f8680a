"""The strategies of the torch-native backend, as data; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec

SINGLE_DEVICE = Capabilities(compiles=("model", "step"))
"""What one process on one device can do."""

DDP = Capabilities(
    launchers=None,
    one_process=False,
    many_devices=True,
    multi_node=True,
)
"""What DistributedDataParallel can do."""

FSDP = Capabilities(
    launchers=None,
    one_process=False,
    many_devices=True,
    multi_node=True,
    sharded_state=True,
    backward_in_forward=False,
    allows_uneven_eval=False,
)
"""What fully_shard can do: forward gathers parameters, so ranks run as many batches; it gets ready
to reduce gradients at its end, so that a backward before it would be without effect."""

MODEL_PARALLEL = FSDP
"""What a mesh of data and tensor parallelism can do."""

DP = Capabilities(one_process=True, many_devices=True, compiles=())
"""What DataParallel can do."""

_DDP = "stratagem.native.strategies.ddp:DDPStrategy"
_SHARDED = "stratagem.native.strategies.ddp_sharded:DDPShardedStrategy"


def strategies() -> tuple[ComponentSpec, ...]:
    """Return the strategies."""
    return (
        StrategySpec(
            name="single_device",
            target="stratagem.native.single_device:SingleDeviceStrategy",
            api_version=1,
            summary="One process, one device",
            capabilities=SINGLE_DEVICE,
        ),
        *_ddp_family(),
        StrategySpec(
            name="dp",
            target="stratagem.native.strategies.dp:DataParallelStrategy",
            api_version=1,
            summary="DataParallel, one process for several GPUs; deprecated, use ddp",
            capabilities=DP,
            incompatible_because=_dp_incompatible_because,
        ),
        *_sharding(),
    )


def _dp_incompatible_because(plan: Any) -> str:
    kernels = getattr(plan.accelerator.source, "data_parallel_kernels", False)
    return why_no_dp(plan.accelerator.name, len(plan.devices), has_kernels=kernels)


def why_no_dp(accelerator: str, devices: int, *, has_kernels: bool) -> str:
    """Return why DataParallel cannot use so many devices of an accelerator, or ""."""
    if devices == 1 or has_kernels:
        return ""
    return (
        f"strategy='dp' splits a batch over GPUs, received {devices} devices of the accelerator "
        f"{accelerator!r}: use strategy='ddp', or devices=1"
    )


def _sharding() -> tuple[ComponentSpec, ...]:
    whole = ("parameters", "gradients", "optimizer")
    shards = {"fsdp_shard_grad_op": whole[1:], "fsdp_no_shard": ()}
    presets: dict[str, tuple[str, dict[str, object]]] = {
        "fsdp": ("parameters, gradients and optimizer state sharded (FSDP2)", {}),
        "fsdp_cpu_offload": ("fsdp with shards in host memory", {"cpu_offload": True}),
        "fsdp_shard_grad_op": (
            "gradients and optimizer state sharded",
            {"sharding_strategy": "SHARD_GRAD_OP"},
        ),
        "fsdp_no_shard": ("nothing sharded, as ddp", {"sharding_strategy": "NO_SHARD"}),
        "fsdp_hybrid_shard": (
            "sharded within a node, replicated over nodes",
            {"sharding_strategy": "HYBRID_SHARD"},
        ),
    }
    fsdp = tuple(
        StrategySpec(
            name=name,
            target="stratagem.native.strategies.fsdp:FSDPStrategy",
            api_version=1,
            summary=summary,
            capabilities=FSDP,
            init_args=init_args,
            shards=shards.get(name, whole),
            offloads=whole if "cpu_offload" in init_args else (),
        )
        for name, (summary, init_args) in presets.items()
    )
    return (
        *fsdp,
        StrategySpec(
            name="model_parallel",
            target="stratagem.native.strategies.model_parallel:ModelParallelStrategy",
            api_version=1,
            summary="Tensor parallelism by a function of yours, sharded over the other ranks",
            capabilities=MODEL_PARALLEL,
            shards=whole,
        ),
    )


_STARTS = {
    "ddp": ("script", "runs the script again for each"),
    "ddp_spawn": ("spawn", "each a new interpreter that imports the script"),
    "ddp_fork": ("fork", "each a copy of this one"),
    "ddp_notebook": ("fork", "each a copy of this one, in a notebook too"),
    "ddp_sharded": ("script", "runs the script again for each"),
    "ddp_sharded_spawn": ("spawn", "each a new interpreter that imports the script"),
}
"""Names of the family: the launcher that starts the processes, and how that is said."""

_UNUSED: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}


def _ddp_family() -> Iterator[StrategySpec]:
    for base, (launcher, how) in _STARTS.items():
        is_sharded = "sharded" in base
        what = "DDP with sharded optimizer state" if is_sharded else "DistributedDataParallel"
        for suffix, arguments in _UNUSED.items():
            yield StrategySpec(
                name=base + suffix,
                target=_SHARDED if is_sharded else _DDP,
                api_version=1,
                summary=(
                    f"{what}, one process a device; {how}"
                    if not suffix
                    else f"{base} with find_unused_parameters={arguments['find_unused_parameters']}"
                ),
                # The default needs no preset, so that an instance and the name resolve alike.
                init_args=arguments
                if launcher == "script"
                else {**arguments, "launcher": launcher},
                capabilities=DDP,
                shards=("optimizer",) if is_sharded else (),
            )
