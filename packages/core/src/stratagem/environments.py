"""Cluster environments, and the base to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.interfaces.cluster_environment import ClusterEnvironment as ClusterEnvironment
    from stratagem.native.environments.lsf import LSFEnvironment as LSFEnvironment
    from stratagem.native.environments.mpi import MPIEnvironment as MPIEnvironment
    from stratagem.native.environments.slurm import SLURMEnvironment as SLURMEnvironment
    from stratagem.native.environments.variables import (
        KubeflowEnvironment as KubeflowEnvironment,
        PlainEnvironment as PlainEnvironment,
        TorchElasticEnvironment as TorchElasticEnvironment,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "cluster_environment")
