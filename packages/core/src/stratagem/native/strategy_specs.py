"""The strategies of the torch-native backend, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec

DDP = Capabilities(
    launchers=("script", "spawn", "fork"),
    one_process=False,
    many_devices=True,
    multi_node=True,
)
"""What DistributedDataParallel can do."""

FSDP = Capabilities(
    launchers=("script", "spawn", "fork"),
    one_process=False,
    many_devices=True,
    multi_node=True,
    sharded_state=True,
    uneven_evaluation=False,
)
"""What fully_shard can do: forward gathers parameters, so ranks run as many batches."""

MODEL_PARALLEL = FSDP
"""What a mesh of data and tensor parallelism can do."""


def strategies() -> tuple[ComponentSpec, ...]:
    """Return the strategies."""
    return (
        StrategySpec(
            name="single_device",
            target="stratagem.interfaces.single_device:SingleDeviceStrategy",
            api_version=1,
            summary="One process, one device",
        ),
        StrategySpec(
            name="ddp",
            target="stratagem.native.strategies.ddp:DDPStrategy",
            api_version=1,
            summary="DistributedDataParallel, one process a device; runs the script again for each",
            capabilities=DDP,
        ),
        *_sharding(),
    )


def _sharding() -> tuple[ComponentSpec, ...]:
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
        ),
    )
