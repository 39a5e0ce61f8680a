"""ClusterEnvironment: where a process learns its rank, the world size and the main address."""

from __future__ import annotations

import os
import signal

from stratagem.errors import ConfigurationError
from stratagem.launch.rank import LISTEN_FD_VARIABLE


class ClusterEnvironment:
    """A process's rank among the others, and what the cluster does when the process ends.

    The defaults read the variables that torch.distributed uses, so a subclass overrides only what
    its cluster says otherwise.

    Who calls, and when:
        1. Of one that is given as an object, resolving reads `creates_processes_externally`. The
           launcher reads `node_rank` before it starts processes.
        2. `Strategy.bind` and `Strategy.setup_environment` read the ranks, on every rank:
           `global_rank`, `local_rank` and `node_rank`; `world_size` and `local_world_size` are what
           the defaults make of these.
        3. A strategy that joins a process group reads `main_address`, `main_port` and
           `holds_store`, on every rank, and rank 0 calls `take_listener`. Either may wait for
           other ranks.
        4. The Trainer reads `run_id`, `restart_count` and `agent_id` when `fit` begins, on every
           rank, and installs handlers for `preemption_signals`.
        5. After the checkpoint that a signal asks for, rank 0 calls `requeues_upon`, and `requeue`
           if that is so.
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
        """Whether this process was already started as one of several ranks."""
        return "LOCAL_RANK" in os.environ

    @property
    def holds_store(self) -> bool:
        """Whether the program that started the ranks holds the store that they meet at."""
        return False

    @property
    def main_address(self) -> str:
        """Host name or address of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """TCP port on which rank 0 listens."""
        return self._number("MASTER_PORT", 29500)

    def take_listener(self) -> int | None:
        """Return, on rank 0 and once, the descriptor of a socket that listens on `main_port`.

        None: there is none, and rank 0 opens the port itself. With a socket that listens before
        anybody learns its port, no other program can take the port in between.
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

    # -- restarts

    def run_id(self) -> str | None:
        """Return what stays the same when the cluster starts this run again; None: it does not."""
        return None

    def restart_count(self) -> int:
        """Return how many times the cluster has started this run again."""
        return 0

    def agent_id(self) -> str | None:
        """Return what names the program that starts this node's ranks again and outlives them.

        None: there is none, or it has no name. A run whose ranks were started anew goes on if one
        of its agents is still there, whatever its `restart_count`.
        """
        return None

    @property
    def preemption_signals(self) -> tuple[signal.Signals, ...]:
        """Signals that announce the end, upon which a run is to be saved and queued again."""
        return ()

    def requeues_upon(self, number: signal.Signals) -> bool:
        """Whether this job is to be queued again after a signal has ended the run; on rank 0."""
        return number in self.preemption_signals

    def requeue(self) -> bool:
        """Ask the cluster to run this job again, on rank 0; return whether it will."""
        return False

    def teardown(self) -> None:
        """Release what the environment holds; on every rank, at the end."""

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
