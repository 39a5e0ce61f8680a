"""Launcher: what starts the ranks, and runs a function on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from stratagem.plan.plan import RunPlan

Result = TypeVar("Result")


class Launcher(ABC):
    """Runs a function on every rank.

    Call sequence: `launch(plan, function)` in the process that the user started, and, where ranks
    run the script again, in each of them. When `function` is called, the environment variables of
    `stratagem.launch.rank_environment` are those of its rank. `launch` may be called several times
    in one process.

    `stratagem.launch` has what a launcher is made of, and an example of one. It is given to the
    Trainer or Lite by `plugins=`, or to a strategy by `launcher=`: an object, or the name of a
    `LauncherSpec`, whose fields of these names say the same:

    Attributes:
        interactive: it works in a notebook or an interactive interpreter.
        new_processes: the function runs in new processes, and the calling one is no rank: only what
            the function returns comes back.
        spans_nodes: it reaches all nodes from the one process that calls it; `plan.num_nodes` may
            be more than 1 without a cluster environment.
        devices_elsewhere: the ranks' devices are not those of the calling machine.
        cluster_environment: name of the cluster environment that its ranks read. One that starts
            ranks again has its own, with `run_id` and `restart_count`: `fit` goes on from the last
            checkpoint then. `rank_environment` is given the same name.
    """

    interactive: ClassVar[bool] = False
    new_processes: ClassVar[bool] = False
    spans_nodes: ClassVar[bool] = False
    devices_elsewhere: ClassVar[bool] = False
    cluster_environment: ClassVar[str] = "plain"

    @abstractmethod
    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run `function(*args, **kwargs)` on every rank of the plan.

        Args:
            plan: what runs; `world_size` ranks, `processes_per_node` on each of `num_nodes` nodes.
            function: called once on every rank.
            args, kwargs: its arguments.

        Returns:
            What it returns on this rank, or on rank 0 where the calling process is no rank.

        Raises:
            RankFailedError: another rank ended with an error; names it and holds its traceback.
        """
