"""What this distribution provides, as data: neither torch nor a class of ours is imported here."""

from __future__ import annotations

import os

from stratagem.discovery import (
    AcceleratorSpec,
    Availability,
    Capabilities,
    CheckpointIOSpec,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)

LOCAL_SGD = Capabilities.parallel(
    parameters="drift",  # between two averages
)
"""What local SGD can do; the spec and the class hold the same object."""


def laptop_availability() -> Availability:
    """Return the cores; `devices="auto"` takes all but one."""
    cores = os.cpu_count() or 1
    return Availability(cores, f"{cores} cores", auto_count=max(1, cores - 1), indexed=False)


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        StrategySpec(
            name="local_sgd",
            target="stratagem_local_sgd.strategy:LocalSGDStrategy",
            api_version=2,
            summary="Each rank steps on its own; parameters are averaged every 4 steps",
            capabilities=LOCAL_SGD,
        ),
        StrategySpec(
            name="local_sgd_16",
            target="stratagem_local_sgd.strategy:LocalSGDStrategy",
            api_version=2,
            summary="Each rank steps on its own; parameters are averaged every 16 steps",
            init_args={"every": 16},
            capabilities=LOCAL_SGD,
        ),
        AcceleratorSpec(
            name="laptop",
            target="stratagem_local_sgd.accelerator:LaptopAccelerator",
            api_version=2,
            summary="The processor, with one core left to its owner",
            probe=laptop_availability,
            priority=-1,  # below the CPU: never chosen by accelerator="auto"
        ),
        CheckpointIOSpec(
            name="json_sidecar",
            target="stratagem_local_sgd.checkpoint:JsonSidecarCheckpointIO",
            api_version=2,
            summary="The single file, and beside it a JSON file with its step and keys",
        ),
    )
