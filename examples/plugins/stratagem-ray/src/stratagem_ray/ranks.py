"""Ranks: the actors of one start, from the launching process's side."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from stratagem.launch import RunPlan, rank_environment
from stratagem_ray.actor import Outcome, Place, RankActor, send_signal
from stratagem_ray.ends import Failed, wait_for_all
from stratagem_ray.environment import RESTARTS_VARIABLE, RUN_VARIABLE

_END_GRACE = 20.0
"""Seconds that ranks have to end by themselves after Ctrl-C or a signal."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ranks:
    """Actors for all ranks of a plan; a context, at whose end Ray kills what is left of them.

    Args:
        plan: of the launch.
        resources: of Ray, for each rank.
        group: room for them, with a bundle for each node.
        environment: name of the cluster environment that they read.
    """

    def __init__(
        self,
        plan: RunPlan,
        resources: Mapping[str, float],
        group: PlacementGroup,
        environment: str,
    ) -> None:
        self._plan = plan
        self._environment = environment
        self._places: dict[int, Place] = {}
        self._calls: list[Any] = []
        self._noted: list[int] = []
        others = {name: each for name, each in resources.items() if name not in ("CPU", "GPU")}
        self._actors = [
            ray.remote(RankActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank // plan.processes_per_node
                ),
            )
            .remote(rank)
            for rank in range(plan.world_size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def run(self, call: Any, run: str, restart: int) -> Outcome | Failed:
        """Run a call on all ranks; return how rank 0 has ended, or the failure of one of them.

        Args:
            call: what `pack` has made, in Ray's store, from where each node fetches it once.
            run: names the launch.
            restart: how many starts there were before this one.
        """
        with self._passing_on_signals():
            one_node = self._plan.num_nodes == 1
            asked = [actor.place.remote(one_node=one_node) for actor in self._actors]
            places = wait_for_all(asked, self._pass_on)
            if isinstance(places, Failed):
                return places
            self._places = dict(enumerate(places))
            told = {RUN_VARIABLE: run, RESTARTS_VARIABLE: str(restart)}
            self._calls = [
                actor.run.remote(call, {**self._variables(rank), **told})
                for rank, actor in enumerate(self._actors)
            ]
            outcomes = wait_for_all(self._calls, self._pass_on)
        return outcomes if isinstance(outcomes, Failed) else outcomes[0]

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank."""
        count, main = self._plan.processes_per_node, self._places[0]
        node_rank, local_rank = divmod(rank, count)
        variables = rank_environment(
            local_rank=local_rank,
            local_world_size=count,
            node_rank=node_rank,
            num_nodes=self._plan.num_nodes,
            main_address=main.address,
            main_port=main.port,
            elsewhere=True,
            cluster_environment=self._environment,
        )
        # Ray shows each rank its own GPU only. Ranks take theirs by the local rank, and reach the
        # memory of those that they see.
        node = range(node_rank * count, (node_rank + 1) * count)
        gpus = [gpu for neighbour in node for gpu in self._places[neighbour].gpus]
        return {**variables, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}

    @contextmanager
    def _passing_on_signals(self) -> Iterator[None]:
        """Let ranks know what this process is told, so that a run can be saved before its end."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
                handler = signal.getsignal(number)
                # Whoever else handles one wants it so. Ray's handler ends this process at once.
                if handler == signal.SIG_DFL or getattr(handler, "__module__", "").startswith(
                    "ray."
                ):
                    before[number] = signal.signal(number, self._note)
        try:
            yield
        except KeyboardInterrupt:
            self._end_by(signal.SIGINT)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No more than that: the main thread may be anywhere in Ray.
        self._noted.append(number)

    def _pass_on(self) -> None:
        """Pass on what was noted.

        Raises:
            SystemExit: it ends this process.
        """
        while self._noted:
            number = self._noted.pop(0)
            if number in _ENDING:
                self._end_by(number)
                raise SystemExit(128 + number)
            self._send(number)

    def _end_by(self, number: int) -> None:
        """Send a signal to all ranks, and wait for their end."""
        # Each is a process that Ray starts first; the ranks have all of the grace after that.
        if sending := self._send(number):
            ray.wait(sending, num_returns=len(sending), timeout=_END_GRACE)
        if self._calls:
            ray.wait(self._calls, num_returns=len(self._calls), timeout=_END_GRACE)

    def _send(self, number: int) -> list[Any]:
        """Begin to send a signal to all ranks, and return the calls that do so."""
        calls = []
        processes: dict[str, list[int]] = defaultdict(list)
        for place in self._places.values():
            processes[place.node].append(place.pid)
        for node, own in processes.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            sending = ray.remote(send_signal).options(num_cpus=0, scheduling_strategy=there)
            calls.append(sending.remote(own, int(number)))
        return calls
