"""The cluster environments of the torch-native backend, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import ClusterEnvironmentSpec, ComponentSpec

_MODULES = "stratagem.native.environments"


def environments() -> tuple[ComponentSpec, ...]:
    """Return the cluster environments; see their classes for what each reads.

    The order of priorities is that of who starts whom: torchrun may run under any of the others,
    jsrun sets the variables of mpirun as well, and mpirun may start its daemons by srun.
    """
    return (_plain(), _torchelastic(), _lsf(), _mpi(), _slurm(), _kubeflow())


def _plain() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="plain",
        target=f"{_MODULES}.plain:PlainEnvironment",
        api_version=1,
        summary="MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK and LOCAL_RANK, or one node",
    )


def _torchelastic() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="TorchElastic",
        target=f"{_MODULES}.torchelastic:TorchElasticEnvironment",
        api_version=1,
        summary="torchrun",
        aliases=("TorchElasticEnvironment",),
        variables=("TORCHELASTIC_RUN_ID",),
        priority=20,
    )


def _lsf() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="LSF",
        target=f"{_MODULES}.lsf:LSFEnvironment",
        api_version=1,
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
        local_world_size=f"{_MODULES}.lsf:local_world_size",
    )


def _mpi() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="MPI",
        target=f"{_MODULES}.mpi:MPIEnvironment",
        api_version=1,
        summary="Open MPI's mpirun",
        aliases=("MPIEnvironment",),
        variables=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        priority=15,
        world_size_variable="OMPI_COMM_WORLD_SIZE",
        local_world_size_variable="OMPI_COMM_WORLD_LOCAL_SIZE",
        rank_variable="OMPI_COMM_WORLD_RANK",
        local_rank_variable="OMPI_COMM_WORLD_LOCAL_RANK",
    )


def _slurm() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="SLURM",
        target=f"{_MODULES}.slurm:SLURMEnvironment",
        api_version=1,
        summary="srun in a SLURM job; requeues on SIGUSR1",
        aliases=("SLURMEnvironment",),
        # A batch script has SLURM_PROCID and SLURM_LOCALID as well, but is in no step.
        variables=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"),
        advice="this is a SLURM job, but srun has not started this process; start the script "
        "with srun to make it a rank, and to have SLURM's signals and requeueing",
        incompatible_because=f"{_MODULES}.slurm:incompatible_because",
        priority=10,
        world_size_variable="SLURM_NTASKS",
        local_world_size_variable="SLURM_STEP_TASKS_PER_NODE",
        rank_variable="SLURM_PROCID",
        local_rank_variable="SLURM_LOCALID",
        local_world_size=f"{_MODULES}.slurm:local_world_size",
    )


def _kubeflow() -> ComponentSpec:
    return ClusterEnvironmentSpec(
        name="Kubeflow",
        target=f"{_MODULES}.kubeflow:KubeflowEnvironment",
        api_version=1,
        summary="pods of a Kubeflow PyTorchJob, one process in each",
        aliases=("KubeflowEnvironment",),
        variables=("KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
        incompatible_because=f"{_MODULES}.kubeflow:incompatible_because",
        priority=5,
        # One process a pod: whoever has a rank was started as one.
        local_rank_variable="RANK",
        local_world_size=f"{_MODULES}.kubeflow:local_world_size",
    )
