"""Environments that only read variables: torchrun and Kubeflow."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path

from stratagem.environments import ClusterEnvironment
from stratagem.launch import ERROR_FILE_VARIABLE


class TorchElasticEnvironment(ClusterEnvironment):
    """Ranks from the variables that torchrun sets.

    Under torchrun with `--max-restarts`, or with a varying number of nodes (`--nnodes=1:2`), `fit`
    goes on from the last checkpoint after the ranks were started anew. Set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun then; `stratagem run --max-restarts` does.

    Example:
        >>> from stratagem.environments import TorchElasticEnvironment
        >>> TorchElasticEnvironment().creates_processes_externally
        True
    """

    def __init__(self) -> None:
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts = self._number("TORCHELASTIC_MAX_RESTARTS", 0)
        if shares_store and restarts > 0 and self.global_rank() == 0:
            warnings.warn(
                f"torchrun --max-restarts={restarts} shares one store between rendezvous and "
                "ranks; after a rank was killed, restarts with it failed in 3 of 4 runs "
                "(connectFullMesh refused). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, "
                "or start the script with `stratagem run --max-restarts`, which does",
                stacklevel=2,
            )

    @property
    def holds_store(self) -> bool:
        """Whether torchrun's agent does; only torch's own rendezvous knows how to reach it."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process was started by torchrun, which is always so."""
        return True

    def node_rank(self) -> int:
        """Return torchrun's GROUP_RANK."""
        return self._number("GROUP_RANK", 0)

    def run_id(self) -> str | None:
        """Return the `--rdzv-id` of torchrun, whose default is the text "none"."""
        return os.environ.get("TORCHELASTIC_RUN_ID")

    def restart_count(self) -> int:
        """Return how many times this node's agent has started its ranks again after a failure.

        It stays as it is when nodes join or leave, which starts the ranks anew as well.
        """
        return self._number("TORCHELASTIC_RESTART_COUNT", 0)

    def agent_id(self) -> str | None:
        """Return this node's name and the folder that torchrun has made for this run's logs.

        The folder has a random name. A run id would not do: torchrun's default is always "none".
        """
        error_file = os.environ.get(ERROR_FILE_VARIABLE)
        if error_file is None:
            return None
        # FOLDER/attempt_0/LOCAL_RANK/error.json
        return f"{socket.gethostname()}:{Path(error_file).parent.parent.parent}"


def no_rank_of_kubeflow_because(environ: Mapping[str, str]) -> str:
    """Return why a process in a pod is no rank of its own: another launcher has started it."""
    if "LOCAL_RANK" in environ:
        return "LOCAL_RANK is set: another launcher has started this process in its pod"
    return ""


def processes_of_pod(environ: Mapping[str, str]) -> int:
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
