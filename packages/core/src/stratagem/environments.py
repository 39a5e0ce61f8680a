"""Cluster environments, and the base to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.interfaces.cluster_environment import ClusterEnvironment as ClusterEnvironment
    from stratagem.one_device.launcher import PlainEnvironment as PlainEnvironment
    from stratagem_torch.environments.lsf import LSFEnvironment as LSFEnvironment
    from stratagem_torch.environments.mpi import MPIEnvironment as MPIEnvironment
    from stratagem_torch.environments.slurm import SLURMEnvironment as SLURMEnvironment
    from stratagem_torch.environments.variables import (
        KubeflowEnvironment as KubeflowEnvironment,
        TorchElasticEnvironment as TorchElasticEnvironment,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "cluster_environment")
