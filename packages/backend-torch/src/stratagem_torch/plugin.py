"""The components of the torch-native backend, as tables; torch is not imported here."""

from __future__ import annotations

from functools import partial
from typing import Any

from stratagem.discovery import (
    Capabilities,
    CheckpointIOSpec,
    ClusterEnvironmentSpec,
    ComponentSpec,
    LauncherSpec,
    NameSpec,
    StrategySpec,
    hookimpl,
)

DDP = Capabilities.parallel()
"""What DistributedDataParallel can do."""

FSDP = Capabilities.parallel(
    sharded_state=True,
    # Forward gathers parameters, so all ranks must run the same number of batches.
    allows_uneven_eval=False,
    follows_evaluation=True,
)
"""What fully_shard can do."""

MODEL_PARALLEL = FSDP
"""What a mesh of data and tensor parallelism can do."""

DP = Capabilities(one_process=True, many_devices=True, compiles=())
"""What DataParallel can do."""


def why_no_dp(accelerator: str, devices: int, *, has_kernels: bool) -> str:
    """Return the reason that DataParallel cannot use these devices, or ""."""
    if devices == 1 or has_kernels:
        return ""
    return (
        f"strategy='dp' splits a batch over GPUs, received {devices} devices of the accelerator "
        f"{accelerator!r}: use strategy='ddp', or devices=1"
    )


def _dp_incompatible_because(plan: Any) -> str:
    kernels = getattr(plan.accelerator.source, "data_parallel_kernels", False)
    return why_no_dp(plan.accelerator.name, len(plan.devices), has_kernels=kernels)


_STRATEGIES = "stratagem_torch.strategies"
_ENVIRONMENTS = "stratagem_torch.environments"
_ALL = ("parameters", "gradients", "optimizer")

# name: launcher, summary. The target follows from the name.
_DDP_NAMES = {
    "ddp": ("script", "DistributedDataParallel; the process of each device runs the script"),
    "ddp_spawn": ("spawn", "ddp in new interpreters, which import the script"),
    "ddp_fork": ("fork", "ddp in copies of this process"),
    "ddp_notebook": ("fork", "ddp_fork by another name, for notebooks"),
    "ddp_sharded": ("script", "ddp with the optimizer state sharded"),
    "ddp_sharded_spawn": ("spawn", "ddp_sharded in new interpreters, as ddp_spawn"),
}
_UNUSED: tuple[dict[str, bool], ...] = (
    {},
    {"find_unused_parameters": True},
    {"find_unused_parameters": False},
)

# name, arguments, sharded state, summary
_FSDP_ROWS: tuple[tuple[str, dict[str, object], tuple[str, ...], str], ...] = (
    ("fsdp", {}, _ALL, "parameters, gradients and optimizer state sharded (FSDP2)"),
    ("fsdp_cpu_offload", {"cpu_offload": True}, _ALL, "fsdp with shards in host memory"),
    (
        "fsdp_shard_grad_op",
        {"sharding_strategy": "SHARD_GRAD_OP"},
        _ALL[1:],
        "gradients and optimizer state sharded",
    ),
    ("fsdp_no_shard", {"sharding_strategy": "NO_SHARD"}, (), "nothing sharded, as ddp"),
    (
        "fsdp_hybrid_shard",
        {"sharding_strategy": "HYBRID_SHARD"},
        _ALL,
        "sharded within a node, replicated over nodes",
    ),
)

# name, class, summary
_CHECKPOINT_ROWS = (
    ("directory", "sharded.directory:DirectoryCheckpointIO", "A directory of ranks' shards (DCP)"),
    ("async", "asynchronous:AsyncCheckpointIO", "Another format, written during training"),
)

# a module of core: the names that it serves, by the module here that defines them
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "stratagem.strategies": {
        "stratagem_torch.distributed.parallel_strategy": ("ParallelStrategy",),
        "stratagem_torch.distributed.process_group": ("ProcessGroupRanks",),
        "stratagem_torch.distributed.activation_checkpointing": (
            "ActivationCheckpointing",
            "Recompute",
            "apply_activation_checkpointing",
            "check_activation_checkpointing",
        ),
        "stratagem_torch.distributed.allocator": ("return_freed_memory", "use_huge_pages"),
        "stratagem_torch.distributed.divergence": ("DivergenceCheck",),
        "stratagem_torch.distributed.turns": ("EvaluationTurns",),
        "stratagem_torch.strategies.by_memory": ("plan_by_memory",),
        "stratagem_torch.strategies.communication_hooks": ("CommHook", "CommWrapper"),
    },
    "stratagem.checkpoint": {
        "stratagem_torch.checkpoint.sharded.directory": ("consolidate_checkpoint",),
        "stratagem_torch.checkpoint.sharded.manifest": ("describe_directory",),
    },
    "stratagem.launch": {
        "stratagem_torch.launch.network": ("free_port",),
        "stratagem_torch.launch.packed": ("pack", "rank_failure", "run_packed"),
        "stratagem_torch.launch.restarts": ("Restarts",),
    },
}


def _ddp(name: str, init_args: dict[str, bool]) -> StrategySpec:
    launcher, summary = _DDP_NAMES[name]
    is_sharded = name.startswith("ddp_sharded")
    target = "ddp_sharded:DDPShardedStrategy" if is_sharded else "ddp:DDPStrategy"
    suffix = ""
    for argument, value in init_args.items():
        suffix = f"_{argument}_{str(value).lower()}"
        summary = f"{name} with {argument}={value}"
    return StrategySpec(
        name=name + suffix,
        target=f"{_STRATEGIES}.{target}",
        api_version=2,
        summary=summary,
        # The default launcher needs no preset, so that an instance and the name resolve alike.
        init_args=init_args if launcher == "script" else {**init_args, "launcher": launcher},
        capabilities=DDP,
        shards=("optimizer",) if is_sharded else (),
    )


_strategy = partial(StrategySpec, api_version=2)
_launcher = partial(LauncherSpec, api_version=2)
_environment = partial(ClusterEnvironmentSpec, api_version=2)

_COMPONENTS: tuple[ComponentSpec, ...] = (
    *(_ddp(name, init_args) for name in _DDP_NAMES for init_args in _UNUSED),
    _strategy(
        name="dp",
        target=f"{_STRATEGIES}.data_parallel:DataParallelStrategy",
        summary="DataParallel, one process for several GPUs; deprecated, use ddp",
        capabilities=DP,
        incompatible_because=_dp_incompatible_because,
    ),
    *(
        _strategy(
            name=name,
            target=f"{_STRATEGIES}.fsdp:FSDPStrategy",
            summary=summary,
            capabilities=FSDP,
            init_args=arguments,
            shards=shards,
            offloads=_ALL if "cpu_offload" in arguments else (),
            placement_arguments=("cpu_offload",),
        )
        for name, arguments, shards, summary in _FSDP_ROWS
    ),
    _strategy(
        name="model_parallel",
        target=f"{_STRATEGIES}.model_parallel:ModelParallelStrategy",
        summary="Tensor parallelism by a function of yours, sharded over the other ranks",
        capabilities=MODEL_PARALLEL,
        shards=_ALL,
    ),
    *(
        CheckpointIOSpec(
            name=name,
            target=f"stratagem_torch.checkpoint.{target}",
            api_version=2,
            summary=summary,
        )
        for name, target, summary in _CHECKPOINT_ROWS
    ),
    _launcher(
        name="script",
        target="stratagem_torch.launch.script:ScriptLauncher",
        summary="This process is the first rank and runs its own command again for the others",
    ),
    _launcher(
        name="spawn",
        target="stratagem_torch.launch.processes:ProcessesLauncher",
        summary="New interpreters, to which the function is pickled; weights come back",
        init_args={"start_method": "spawn"},
        new_processes=True,
    ),
    _launcher(
        name="fork",
        target="stratagem_torch.launch.processes:ProcessesLauncher",
        summary="Copies of this process, also in a notebook; weights come back",
        init_args={"start_method": "fork"},
        interactive=True,
        new_processes=True,
    ),
    # The priorities follow the nesting of launchers: torchrun may run under any other, jsrun sets
    # the variables of mpirun too, and mpirun may start its daemons with srun.
    _environment(
        name="TorchElastic",
        target=f"{_ENVIRONMENTS}.variables:TorchElasticEnvironment",
        summary="torchrun",
        aliases=("TorchElasticEnvironment",),
        variables=("TORCHELASTIC_RUN_ID",),
        priority=20,
    ),
    _environment(
        name="LSF",
        target=f"{_ENVIRONMENTS}.lsf:LSFEnvironment",
        summary="jsrun in an LSF job",
        aliases=("LSFEnvironment",),
        variables=(
            "LSB_JOBID",
            "JSM_NAMESPACE_SIZE",
            "JSM_NAMESPACE_RANK",
            "JSM_NAMESPACE_LOCAL_RANK",
        ),
        advice="this is an LSF job, but jsrun has not started this process; start the script "
        "with jsrun to make it a rank",
        priority=18,
        world_size_variable="JSM_NAMESPACE_SIZE",
        local_world_size_variable="JSM_NAMESPACE_LOCAL_SIZE",
        rank_variable="JSM_NAMESPACE_RANK",
        local_rank_variable="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size=f"{_ENVIRONMENTS}.lsf:local_world_size",
    ),
    _environment(
        name="MPI",
        target=f"{_ENVIRONMENTS}.mpi:MPIEnvironment",
        summary="Open MPI's mpirun",
        aliases=("MPIEnvironment",),
        variables=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        priority=15,
        world_size_variable="OMPI_COMM_WORLD_SIZE",
        local_world_size_variable="OMPI_COMM_WORLD_LOCAL_SIZE",
        rank_variable="OMPI_COMM_WORLD_RANK",
        local_rank_variable="OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    _environment(
        name="SLURM",
        target=f"{_ENVIRONMENTS}.slurm:SLURMEnvironment",
        summary="srun in a SLURM job; requeues on SIGUSR1",
        aliases=("SLURMEnvironment",),
        # A batch script has SLURM_PROCID and SLURM_LOCALID as well, but is in no step.
        variables=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"),
        advice="this is a SLURM job, but srun has not started this process; start the script "
        "with srun to make it a rank, and to have SLURM's signals and requeueing",
        incompatible_because=f"{_ENVIRONMENTS}.slurm:incompatible_because",
        priority=10,
        world_size_variable="SLURM_NTASKS",
        local_world_size_variable="SLURM_STEP_TASKS_PER_NODE",
        rank_variable="SLURM_PROCID",
        local_rank_variable="SLURM_LOCALID",
        local_world_size=f"{_ENVIRONMENTS}.slurm:local_world_size",
    ),
    _environment(
        name="Kubeflow",
        target=f"{_ENVIRONMENTS}.variables:KubeflowEnvironment",
        summary="pods of a Kubeflow PyTorchJob, one process in each",
        aliases=("KubeflowEnvironment",),
        variables=("KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
        incompatible_because=f"{_ENVIRONMENTS}.variables:no_rank_of_kubeflow_because",
        priority=5,
        # One process a pod: whoever has a rank was started as one.
        local_rank_variable="RANK",
        local_world_size=f"{_ENVIRONMENTS}.variables:processes_of_pod",
    ),
    *(
        NameSpec(name=f"{room}.{name}", target=f"{module}:{name}", api_version=2)
        for room, modules in _NAMES.items()
        for module, names in modules.items()
        for name in names
    ),
)


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the components of this backend."""
    return _COMPONENTS
