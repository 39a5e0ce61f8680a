"""PlainEnvironment: the variables that launchers set for a rank."""

from __future__ import annotations

from stratagem.interfaces.cluster_environment import ClusterEnvironment


class PlainEnvironment(ClusterEnvironment):
    """Ranks from MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK and LOCAL_RANK.

    Set by a launcher of ours for each process, or by hand: on every node the first three and
    NODE_RANK, and the launcher starts that node's processes.

    Example:
        >>> from stratagem.environments import PlainEnvironment
        >>> PlainEnvironment().world_size()
        1
    """
