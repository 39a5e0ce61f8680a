"""What this distribution offers for Intel Gaudi: specs only, no torch and no SDK."""

from __future__ import annotations

from stratagem.discovery import (
    AcceleratorSpec,
    Capabilities,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)

HPU_SINGLE = Capabilities(accelerators=("hpu",), compiles=())
"""What one Gaudi device can do."""

HPU_PARALLEL = Capabilities.parallel(
    accelerators=("hpu",),
    compiles=(),
)
"""What DistributedDataParallel over hccl can do."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this backend provides for Gaudi."""
    return (
        AcceleratorSpec(
            name="hpu",
            target="stratagem_hpu_ipu.hpu_accelerator:HPUAccelerator",
            api_version=2,
            summary="Intel Gaudi; hccl between ranks. Never run on hardware",
            probe="stratagem_hpu_ipu.hpu_probe:hpu_availability",
            priority=90,
            requires_dedicated_strategies=True,
        ),
        StrategySpec(
            name="hpu_single",
            target="stratagem_hpu_ipu.hpu_strategy:SingleHPUStrategy",
            api_version=2,
            summary="One process, one Gaudi device",
            capabilities=HPU_SINGLE,
        ),
        StrategySpec(
            name="hpu_parallel",
            target="stratagem_hpu_ipu.hpu_strategy:HPUParallelStrategy",
            api_version=2,
            summary="DistributedDataParallel over hccl, one process a Gaudi device",
            capabilities=HPU_PARALLEL,
        ),
    )


@hookimpl
def stratagem_choose_strategy(candidates: tuple[str, ...]) -> str | None:
    """Choose ours where they fit, which is on Gaudi only; else leave the choice to others."""
    return next((name for name in ("hpu_single", "hpu_parallel") if name in candidates), None)
