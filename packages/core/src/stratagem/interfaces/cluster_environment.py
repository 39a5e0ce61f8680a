"""ClusterEnvironment: the source of a process's rank, the world size and the main address."""

from __future__ import annotations

import os
import signal

from stratagem.errors import ConfigurationError
from stratagem.launch.rank import LISTEN_FD_VARIABLE, STORE_VARIABLE


class ClusterEnvironment:
    """A process's rank in the cluster, and the cluster's means to restart a run.

    The defaults read the environment variables of torch.distributed. A subclass overrides only the
    values that its cluster defines in another way.

    Call sequence:
        1. For an environment passed as an object, resolution reads `creates_processes_externally`.
           The launcher reads `node_rank` before it starts processes.
        2. `Strategy.bind` and `Strategy.setup_environment` read `global_rank`, `local_rank` and
           `node_rank` on every rank. The default `global_rank` is computed from the node's rank and
           `local_world_size`; `world_size` is the number of ranks on all nodes.
        3. A strategy that joins a process group reads `main_address`, `main_port`, `store_file`
           and `holds_store` on every rank, and rank 0 calls `take_listener`. Each of these may
           wait for other ranks.
        4. The Trainer reads `run_id`, `restart_count` and `agent_id` on every rank when `fit`
           begins, and installs handlers for `preemption_signals`.
        5. After a preemption signal and the checkpoint that follows, rank 0 calls `requeues_upon`.
           If that returns True, it calls `requeue`.
        6. `teardown`, on every rank, at the end.

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
        """Whether this process was already started as a rank, together with others."""
        return "LOCAL_RANK" in os.environ

    @property
    def holds_store(self) -> bool:
        """Whether the program that started the ranks serves their rendezvous store."""
        return False

    @property
    def main_address(self) -> str:
        """Host name or address of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """TCP port on which rank 0 listens."""
        return self._number("MASTER_PORT", 29500)

    @property
    def store_file(self) -> str | None:
        """Path of the file by which ranks on one node meet; None: they meet at `main_port`.

        Unlike a port, the file is accessible to this user only. Ignored if there are several nodes.
        """
        return os.environ.get(STORE_VARIABLE)

    def take_listener(self) -> int | None:
        """Return the file descriptor of a socket that listens on `main_port`; once, on rank 0.

        If None, rank 0 opens the port itself. A socket that listens before its port is announced
        prevents another program from taking the port.
        """
        listen_fd = os.environ.pop(LISTEN_FD_VARIABLE, None)
        return None if listen_fd is None else int(listen_fd)

    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        return self._number("WORLD_SIZE", 1)

    def local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return self._number("LOCAL_WORLD_SIZE", 1)

    def global_rank(self) -> int:
        """Return this process's rank among all ranks."""
        if "RANK" in os.environ:
            return self._number("RANK", 0)
        return self.node_rank() * self.local_world_size() + self.local_rank()

    def local_rank(self) -> int:
        """Return this process's rank on its node."""
        return self._number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Return the rank of this node."""
        return self._number("NODE_RANK", self._number("GROUP_RANK", 0))

    # -- restarts

    def run_id(self) -> str | None:
        """Return an ID that stays the same across restarts of this run.

        Return None if the cluster does not restart runs.
        """
        return None

    def restart_count(self) -> int:
        """Return the number of times that the cluster has restarted this run."""
        return 0

    def agent_id(self) -> str | None:
        """Return the ID of the agent, the program that restarts this node's ranks.

        None if no agent exists or it has no ID. After a restart of the ranks, a run continues if
        at least one agent is the same as before, whatever the `restart_count`.
        """
        return None

    @property
    def preemption_signals(self) -> tuple[signal.Signals, ...]:
        """Signals that announce the end of the job, so that the run is saved and requeued."""
        return ()

    def requeues_upon(self, number: signal.Signals) -> bool:
        """Return whether to requeue this job after a signal has ended the run; on rank 0."""
        return number in self.preemption_signals

    def requeue(self) -> bool:
        """Ask the cluster to requeue this job; return whether it accepted. Called on rank 0."""
        return False

    def teardown(self) -> None:
        """Release the environment's resources; called on every rank, at the end."""

    @staticmethod
    def _number(variable: str, default: int | None = None) -> int:
        text = os.environ.get(variable)
        if text is None and default is not None:
            return default
        if text is None or not text.strip().isdigit():
            raise ConfigurationError(
                f"expected a number in the environment variable {variable}, received "
                + ("nothing: it is not set" if text is None else repr(text))
            )
        return int(text)
