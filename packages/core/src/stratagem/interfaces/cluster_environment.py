"""ClusterEnvironment: where a process learns its rank, the world size and the main address."""

from __future__ import annotations

import os

from stratagem.errors import ConfigurationError


class ClusterEnvironment:
    """Tells a process who it is among the others.

    The defaults read the variables that torch.distributed uses, so a subclass overrides only what
    its cluster says otherwise.

    Who calls, and when: the launcher reads `node_rank` before it starts processes; then
    `Strategy.setup_environment` reads the rest, once on every rank.

    Example:
        >>> class MyCluster(ClusterEnvironment):
        ...     @property
        ...     def main_address(self) -> str:
        ...         return "127.0.0.1"
        >>> MyCluster().main_address
        '127.0.0.1'
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process was already started as one of several ranks."""
        return "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """Host name or address of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """TCP port on which rank 0 listens."""
        return self._number("MASTER_PORT", 29500)

    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        return self._number("WORLD_SIZE", 1)

    def local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return self._number("LOCAL_WORLD_SIZE", 1)

    def global_rank(self) -> int:
        """Return this process's rank among all."""
        if "RANK" in os.environ:
            return self._number("RANK", 0)
        return self.node_rank() * self.local_world_size() + self.local_rank()

    def local_rank(self) -> int:
        """Return this process's rank on its node."""
        return self._number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Return the rank of this node."""
        return self._number("NODE_RANK", self._number("GROUP_RANK", 0))

    def teardown(self) -> None:
        """Release what the environment holds; on every rank, at the end."""

    @staticmethod
    def _number(variable: str, default: int) -> int:
        text = os.environ.get(variable)
        if text is None:
            return default
        if not text.strip().isdigit():
            raise ConfigurationError(
                f"expected a number in the environment variable {variable}, received {text!r}"
            )
        return int(text)
