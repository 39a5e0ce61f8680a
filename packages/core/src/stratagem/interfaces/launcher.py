"""Launcher: starts the ranks, and runs a function on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from stratagem.plan.plan import RunPlan

Result = TypeVar("Result")


class Launcher(ABC):
    """Runs a function on every rank.

    Call sequence: `launch(plan, function)` in the process that the user started. If ranks run the
    script again, `launch` is called in each rank too. When `function` is called, the environment
    variables of `stratagem.launch.rank_environment` have the values of its rank. `launch` may be
    called several times in one process.

    `stratagem.launch` provides the building blocks of a launcher, and an example. Pass a launcher
    to the Trainer or Lite as `plugins=`, or to a strategy as `launcher=`: an object, or the name of
    a `LauncherSpec`. The attributes below have the same names and meaning as the spec's fields.

    Attributes:
        interactive: whether it works in a notebook or an interactive interpreter.
        new_processes: whether the function runs in new processes. The calling process is then not a
            rank, and receives only the function's return value.
        spans_nodes: whether one call of `launch` reaches all nodes, so that `plan.num_nodes` may be
            more than 1 without a cluster environment.
        devices_elsewhere: whether the ranks use devices of other machines than the calling one.
        cluster_environment: the name of the cluster environment that the ranks read. A launcher
            that restarts ranks has its own, with `run_id` and `restart_count`, so that `fit`
            continues from the last checkpoint. Pass the same name to `rank_environment`.
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
            plan: the plan of the run: `world_size` ranks, `processes_per_node` on each of
                `num_nodes` nodes.
            function: called once on every rank.
            args, kwargs: the arguments of `function`.

        Returns:
            The function's return value on this rank, or on rank 0 if the calling process is not a
            rank.

        Raises:
            RankFailedError: another rank failed. The error names the rank and holds its traceback.
        """
