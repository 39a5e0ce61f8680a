"""What the torch-native backend provides, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import (
    AcceleratorSpec,
    Availability,
    CheckpointIOSpec,
    ComponentSpec,
    LauncherSpec,
    LoggerSpec,
    PrecisionSpec,
    hookimpl,
)
from stratagem.native.environment_specs import environments
from stratagem.native.strategy_specs import strategies


def cpu_availability() -> Availability:
    """Return the cores of this process; any number of ranks may share them."""
    # Here, because it brings sockets and subprocesses, which a listing of names does not need.
    from stratagem.launch.cores import available_cores

    cores = available_cores()
    return Availability(cores, f"{cores} cores", auto_count=1, indexed=False)


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this backend provides."""
    return (
        *strategies(),
        *_accelerators(),
        *_precisions(),
        *_checkpoint_formats(),
        *_launchers(),
        *environments(),
        *_loggers(),
    )


def _precisions() -> tuple[ComponentSpec, ...]:
    true, mixed = (
        "stratagem.native.precision.true:TruePrecision",
        "stratagem.native.precision.mixed:MixedPrecision",
    )
    return (
        PrecisionSpec(
            name="32-true",
            target=true,
            api_version=1,
            summary="float32 throughout",
            init_args={"name": "32-true"},
            aliases=("32",),
        ),
        PrecisionSpec(
            name="64-true",
            target=true,
            api_version=1,
            summary="float64 throughout",
            init_args={"name": "64-true"},
            aliases=("64",),
        ),
        PrecisionSpec(
            name="16-true",
            target=true,
            api_version=1,
            summary="float16 throughout",
            init_args={"name": "16-true"},
        ),
        PrecisionSpec(
            name="bf16-true",
            target=true,
            api_version=1,
            summary="bfloat16 throughout",
            init_args={"name": "bf16-true"},
        ),
        PrecisionSpec(
            name="bf16-mixed",
            target=mixed,
            api_version=1,
            summary="float32 parameters, bfloat16 where autocast finds it safe",
            init_args={"name": "bf16-mixed"},
            aliases=("bf16",),
        ),
    )


def _accelerators() -> tuple[ComponentSpec, ...]:
    return (
        AcceleratorSpec(
            name="cpu",
            target="stratagem.native.accelerators.cpu:CPUAccelerator",
            api_version=1,
            summary="The processor; gloo between ranks",
            probe=cpu_availability,
        ),
    )


def _checkpoint_formats() -> tuple[ComponentSpec, ...]:
    return (
        CheckpointIOSpec(
            name="single_file",
            target="stratagem.native.checkpoint.single_file:SingleFileCheckpointIO",
            api_version=1,
            summary="One file with a checksum, replaced atomically, loaded weights-only",
        ),
        CheckpointIOSpec(
            name="directory",
            target="stratagem.native.checkpoint.sharded.directory:DirectoryCheckpointIO",
            api_version=1,
            summary="A directory that all ranks write together, each its shards (DCP)",
        ),
        CheckpointIOSpec(
            name="async",
            target="stratagem.native.checkpoint.asynchronous:AsyncCheckpointIO",
            api_version=1,
            summary="Another format, written while training goes on",
        ),
    )


def _launchers() -> tuple[ComponentSpec, ...]:
    return (
        LauncherSpec(
            name="in_process",
            target="stratagem.native.launchers.in_process:InProcessLauncher",
            api_version=1,
            summary="The current process, alone",
            starts_ranks=False,
            interactive=True,
        ),
        LauncherSpec(
            name="external",
            target="stratagem.native.launchers.external:ExternalLauncher",
            api_version=1,
            summary="The processes are there already (torchrun, a cluster, `stratagem run`)",
            starts_ranks=False,
            interactive=True,
        ),
        LauncherSpec(
            name="script",
            target="stratagem.native.launchers.script:ScriptLauncher",
            api_version=1,
            summary="This process is the first rank and runs its own command again for the others",
        ),
        LauncherSpec(
            name="spawn",
            target="stratagem.native.launchers.processes:ProcessesLauncher",
            api_version=1,
            summary="New interpreters, to which the function is pickled; weights come back",
            init_args={"start_method": "spawn"},
            new_processes=True,
        ),
        LauncherSpec(
            name="fork",
            target="stratagem.native.launchers.processes:ProcessesLauncher",
            api_version=1,
            summary="Copies of this process, also in a notebook; weights come back",
            init_args={"start_method": "fork"},
            interactive=True,
            new_processes=True,
        ),
    )


def _loggers() -> tuple[ComponentSpec, ...]:
    return (
        LoggerSpec(
            name="csv",
            target="stratagem.loggers.csv_logger:CSVLogger",
            api_version=1,
            summary="values in a CSV file",
        ),
    )
