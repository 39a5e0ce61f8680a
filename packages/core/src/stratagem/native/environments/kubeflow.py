"""KubeflowEnvironment: pods of a PyTorchJob, one process in each."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stratagem.interfaces.cluster_environment import ClusterEnvironment


def incompatible_because(environ: Mapping[str, str]) -> str:
    """Return why a process in a pod is no rank of its own: another launcher has started it."""
    if "LOCAL_RANK" in environ:
        return "LOCAL_RANK is set: another launcher has started this process in its pod"
    return ""


def local_world_size(environ: Mapping[str, str]) -> int:
    """Return 1: the operator starts one process in each pod."""
    return 1


class KubeflowEnvironment(ClusterEnvironment):
    """Ranks from the variables that Kubeflow's training operator sets for the pods of a PyTorchJob.

    Each pod is one rank. For several devices in a pod, let it run `torchrun`, which the operator
    describes the other pods by its own variables.

    Checked against the operator's documented variables, never run on a Kubeflow cluster.

    Example:
        >>> from stratagem.environments import KubeflowEnvironment
        >>> KubeflowEnvironment().local_world_size()
        1
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the operator has started this process, which is always so."""
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    def world_size(self) -> int:
        return self._number("WORLD_SIZE")

    def local_world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return self._number("RANK")

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self._number("RANK")
