"""TorchElasticEnvironment: processes started by torchrun."""

from __future__ import annotations

from stratagem.interfaces.cluster_environment import ClusterEnvironment


class TorchElasticEnvironment(ClusterEnvironment):
    """Ranks from the variables that torchrun sets.

    Example:
        >>> from stratagem.environments import TorchElasticEnvironment
        >>> TorchElasticEnvironment().creates_processes_externally
        True
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process was started by torchrun, which is always so."""
        return True

    def node_rank(self) -> int:
        """Return torchrun's GROUP_RANK."""
        return self._number("GROUP_RANK", 0)
