"""RayEnvironment: what a rank knows that the launcher has started as an actor."""

from __future__ import annotations

import os
import socket

from stratagem.environments import ClusterEnvironment

RUN_VARIABLE = "STRATAGEM_RAY_RUN"
RESTARTS_VARIABLE = "STRATAGEM_RAY_RESTARTS"

_listener: socket.socket | None = None
"""Of rank 0: listens from before anybody is told its port, so that no other program takes it."""


def listen(address: str) -> int:
    """Let this process, which will be rank 0, listen on one of its addresses; return the port."""
    global _listener
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _listener = socket.create_server((address, 0), family=family, backlog=4096)
    port: int = _listener.getsockname()[1]
    return port


class RayEnvironment(ClusterEnvironment):
    """Ranks, run and restarts from the variables that the launcher gives each actor.

    Example:
        >>> from stratagem_ray import RayEnvironment
        >>> RayEnvironment().restart_count()
        0
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is an actor that the launcher has started."""
        return RUN_VARIABLE in os.environ

    def take_listener(self) -> int | None:
        """Return the socket of `listen`, on rank 0 and once."""
        global _listener
        taken, _listener = _listener, None
        return None if taken is None else taken.detach()

    def run_id(self) -> str | None:
        """Return what is the same for all starts of one launch, and no other's."""
        return os.environ.get(RUN_VARIABLE)

    def restart_count(self) -> int:
        """Return how many times the ranks of this launch were started again."""
        return self._number(RESTARTS_VARIABLE, 0)
