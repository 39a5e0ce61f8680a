"""The environment variables of a rank."""

from __future__ import annotations

import os
import sys

from stratagem.launch.process import threads_per_rank
from stratagem.launch.rank import LAUNCH_VARIABLE, forget_foreign_variables


def _present_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib would be imported for this alone
    except OSError:
        return None


LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
"""The name of the loopback interface; None: unknown on this system."""

STARTED_IN = _present_folder()
"""The working directory when Stratagem was imported; a script may change it later."""


def rank_environment(
    *,
    local_rank: int,
    local_world_size: int,
    node_rank: int = 0,
    num_nodes: int = 1,
    main_address: str = "127.0.0.1",
    main_port: int,
    elsewhere: bool = False,
    cluster_environment: str = "plain",
) -> dict[str, str]:
    """Return the environment variables that make a process a rank.

    Args:
        local_rank: the rank on its node, from 0.
        local_world_size: number of ranks on each node.
        node_rank: the rank of its node, from 0.
        num_nodes: number of nodes.
        main_address: host of rank 0, as the other nodes reach it.
        main_port: a free port on that host (`free_port`), used for the ranks' rendezvous.
        elsewhere: the rank runs on another machine with an unknown number of cores. OMP_NUM_THREADS
            is left out.
        cluster_environment: name of the cluster environment that the rank reads, from the
            launcher's spec.

    Example:
        >>> from stratagem.launch import rank_environment
        >>> environment = rank_environment(local_rank=1, local_world_size=2, main_port=29500)
        >>> environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]
        ('1', '2', '127.0.0.1')
    """
    network: dict[str, str] = {}
    if num_nodes == 1 and LOOPBACK_INTERFACE:
        # gloo listens on the address of the host's name by default.
        network["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    return {
        **network,
        "MASTER_ADDR": main_address,
        "MASTER_PORT": str(main_port),
        "WORLD_SIZE": str(local_world_size * num_nodes),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "LOCAL_RANK": str(local_rank),
        "RANK": str(node_rank * local_world_size + local_rank),
        "STRATAGEM_CLUSTER": cluster_environment,
        **({} if elsewhere else {"OMP_NUM_THREADS": threads_per_rank(local_world_size)}),
    }


def environment_of_request(ordinal: int) -> dict[str, str]:
    """Return the environment for the n-th request of this process, counted from 0.

    A child process of a rank inherits the rank's variables, but is not a rank: they are removed. A
    rank that runs its script again repeats the requests made before the launch. They are resolved
    without the rank's variables, as in the first process before the launch.
    """
    variables = rank_environment(local_rank=0, local_world_size=1, main_port=0, elsewhere=True)
    forget_foreign_variables(variables)
    environ = dict(os.environ)
    if ordinal < int(environ.get(LAUNCH_VARIABLE, "0")):
        for variable in variables:
            environ.pop(variable, None)
    return environ
