"""The components of core: one process on one device. torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import (
    AcceleratorSpec,
    Availability,
    CallbackSpec,
    Capabilities,
    CheckpointIOSpec,
    ClusterEnvironmentSpec,
    ComponentSpec,
    LauncherSpec,
    LoggerSpec,
    PrecisionSpec,
    StrategySpec,
    hookimpl,
)

SINGLE_DEVICE = Capabilities()
"""What one process on one device can do."""


def cpu_availability() -> Availability:
    """Return the cores of this process; any number of ranks may share them."""
    # Imported here: it imports socket and subprocess, which a listing of names does not need.
    from stratagem.launch.process import available_cores, host_memory

    cores = available_cores()
    return Availability(cores, f"{cores} cores", 1, indexed=False, memory=host_memory())


# name, class, aliases, summary
_PRECISION_ROWS = (
    ("32-true", "TruePrecision", ("32",), "float32 throughout"),
    ("64-true", "TruePrecision", ("64",), "float64 throughout"),
    ("16-true", "TruePrecision", (), "float16 throughout"),
    ("bf16-true", "TruePrecision", (), "bfloat16 throughout"),
    ("bf16-mixed", "MixedPrecision", ("bf16",), "float32 parameters, bfloat16 by autocast"),
)

_COMPONENTS: tuple[ComponentSpec, ...] = (
    StrategySpec(
        name="single_device",
        target="stratagem.one_device.strategy:SingleDeviceStrategy",
        api_version=2,
        summary="One process, one device",
        capabilities=SINGLE_DEVICE,
    ),
    AcceleratorSpec(
        name="cpu",
        target="stratagem.one_device.accelerators:CPUAccelerator",
        api_version=2,
        summary="The processor; gloo between ranks",
        probe=cpu_availability,
    ),
    *(
        PrecisionSpec(
            name=name,
            target=f"stratagem.one_device.precision:{target}",
            api_version=2,
            summary=summary,
            init_args={"name": name},
            aliases=aliases,
        )
        for name, target, aliases, summary in _PRECISION_ROWS
    ),
    CheckpointIOSpec(
        name="single_file",
        target="stratagem.one_device.single_file:SingleFileCheckpointIO",
        api_version=2,
        summary="One file with a checksum, atomic",
    ),
    LauncherSpec(
        name="in_process",
        target="stratagem.one_device.launcher:InProcessLauncher",
        api_version=2,
        summary="The current process, alone",
        starts_ranks=False,
        interactive=True,
    ),
    LauncherSpec(
        name="external",
        target="stratagem.one_device.launcher:ExternalLauncher",
        api_version=2,
        summary="The processes are there already (torchrun, a cluster, `stratagem run`)",
        starts_ranks=False,
        interactive=True,
    ),
    ClusterEnvironmentSpec(
        name="plain",
        target="stratagem.one_device.launcher:PlainEnvironment",
        api_version=2,
        summary="MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK and LOCAL_RANK, or one node",
    ),
    LoggerSpec(
        name="csv",
        target="stratagem.loggers.csv_logger:CSVLogger",
        api_version=2,
        summary="values in a CSV file",
    ),
    *(
        CallbackSpec(
            name=name, target=f"stratagem.callbacks.{place}", api_version=2, summary=summary
        )
        for name, place, summary in (
            ("model_checkpoint", "checkpoints.model_checkpoint:ModelCheckpoint", "save and keep"),
            ("progress_bar", "progress.bar:ProgressBar", "show progress"),
        )
    ),
)


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the components of core."""
    return _COMPONENTS
