"""Launchers that start no process, and PlainEnvironment: the variables that launchers set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.launcher import Launcher, Result
from stratagem.launch.rank import run_as_rank
from stratagem.plan.plan import RunPlan


class InProcessLauncher(Launcher):
    """Calls the function here."""

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`."""
        return function(*args, **kwargs)


class ExternalLauncher(Launcher):
    """Calls the function in this process, which is already a rank."""

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`; an exception is reported to who started this rank."""
        return run_as_rank(function, *args, **kwargs)


class PlainEnvironment(ClusterEnvironment):
    """Ranks from MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK and LOCAL_RANK.

    Set by a launcher of ours for each process, or by hand: on every node the first three and
    NODE_RANK, and the launcher starts that node's processes.

    Example:
        >>> from stratagem.environments import PlainEnvironment
        >>> PlainEnvironment().world_size()
        1
    """
