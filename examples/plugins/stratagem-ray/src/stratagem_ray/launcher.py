"""RayLauncher: starts ranks as actors of a Ray cluster, and all of them again if one is lost."""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from stratagem.errors import ConfigurationError
from stratagem.launch import Launcher, RunPlan, unpack_result
from stratagem_ray.cluster import connection
from stratagem_torch.launch import pack, rank_failure

_PLACEMENTS = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_RAYS_NAMES = {"cpu": None, "cuda": "GPU", "gpu": "GPU", "hpu": "HPU", "tpu": "TPU"}
"""What Ray calls a device of an accelerator; each rank takes one."""


class RayLauncher(Launcher):
    """Runs the function in actors of a Ray cluster, one a rank; this process waits.

    A rank that is lost, with its process or with its node, ends the others, and all are started
    again where there is room: `fit` goes on from the last checkpoint that the run has saved, which
    has to be where every node finds it. A rank that raises ends the run, since it would again.

    Args:
        address: of a Ray cluster, as of `ray.init`; None: the one that this process is connected
            to, else RAY_ADDRESS, else a local one is started, on loopback, and ended.
        placement: how Ray places the plan's nodes: "SPREAD" over machines where it can,
            "STRICT_SPREAD" in any case, "PACK" on few machines where it can, "STRICT_PACK" on one.
            The ranks of one node are always together.
        resources_per_rank: Ray's resources for each rank, such as {"CPU": 4, "GPU": 1,
            "fast_disk": 1}. None: one CPU, and one device of the accelerator. Those that are named
            go before these.
        max_restarts: how many times ranks may be started again in one launch.
        timeout: seconds to wait for room for all ranks, at each start.

    Raises:
        ConfigurationError: an argument is not what is said here.

    Example:
        >>> from stratagem_ray import RayLauncher
        >>> RayLauncher(placement="PACK", resources_per_rank={"CPU": 4}).placement
        'PACK'
    """

    interactive: ClassVar[bool] = True
    new_processes: ClassVar[bool] = True
    spans_nodes: ClassVar[bool] = True
    devices_elsewhere: ClassVar[bool] = True
    cluster_environment: ClassVar[str] = "ray_ranks"

    def __init__(
        self,
        *,
        address: str | None = None,
        placement: str = "SPREAD",
        resources_per_rank: Mapping[str, float] | None = None,
        max_restarts: int = 3,
        timeout: float = 300.0,
    ) -> None:
        if placement not in _PLACEMENTS:
            raise ConfigurationError(
                f"placement={placement!r}: expected one of {', '.join(map(repr, _PLACEMENTS))}"
            )
        if not isinstance(max_restarts, int) or max_restarts < 0:
            raise ConfigurationError(
                f"max_restarts={max_restarts!r}: expected a whole number of at least 0"
            )
        given = dict(resources_per_rank or {})
        if not all(isinstance(each, (int, float)) and each >= 0 for each in given.values()):
            raise ConfigurationError(
                f"resources_per_rank={given!r}: expected names of Ray's resources with numbers of "
                "at least 0, such as {'CPU': 2}"
            )
        if not isinstance(timeout, (int, float)) or timeout <= 0:
            raise ConfigurationError(f"timeout={timeout!r}: expected seconds, more than 0")
        if given.get("GPU", 1) not in (0, 1):
            raise ConfigurationError(
                f"resources_per_rank={given!r}: each rank uses one GPU; expected 'GPU': 1, or none"
            )
        self.address = address
        self.placement = placement
        self.resources_per_rank = given
        self.max_restarts = max_restarts
        self.timeout = timeout

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function on every rank; return what rank 0 returns, which is safe data.

        Raises:
            ConfigurationError: something cannot be pickled, there is no cluster, or it has no room.
            RankFailedError: a rank failed, or was lost once more than `max_restarts`.
        """
        resources = self._resources(plan)
        call = pack(plan, function, args, kwargs)
        with connection(self.address, cpus=int(resources.get("CPU", 0) * plan.world_size + 1)):
            result = self._run(plan, call, resources)
        return None if result is None else unpack_result(result)

    def _run(self, plan: RunPlan, call: bytes, resources: Mapping[str, float]) -> bytes | None:
        # Here, because importing Ray takes seconds, which only a launch needs.
        import ray

        from stratagem_ray.ends import Failed
        from stratagem_ray.placement import Room, placed
        from stratagem_ray.ranks import Ranks

        node = {name: each * plan.processes_per_node for name, each in resources.items() if each}
        room = Room(plan.num_nodes, node, self.placement)
        stored, run = ray.put(call), uuid.uuid4().hex
        for restart in itertools.count():
            with (
                placed(room, self.timeout) as group,
                Ranks(plan, resources, group, self.cluster_environment) as ranks,
            ):
                ended = ranks.run(stored, run, restart)
            if not isinstance(ended, Failed):
                return ended.result
            error = rank_failure(
                ended.rank,
                plan.world_size,
                report=ended.report,
                exit_code=ended.exit_code,
                how=ended.how,
            )
            if not ended.was_lost or restart == self.max_restarts:
                raise error
            print(
                f"stratagem: {error}\nstratagem: all ranks are started again "
                f"({restart + 1} of {self.max_restarts})",
                file=sys.stderr,
                flush=True,
            )
        raise AssertionError  # a count has no end

    def _resources(self, plan: RunPlan) -> dict[str, float]:
        """Return Ray's resources for each rank."""
        if plan.devices != tuple(range(len(plan.devices))):
            raise ConfigurationError(
                f"devices={plan.request.devices!r} chooses devices, which Ray does: pass the "
                f"number of them on each node, devices={len(plan.devices)}"
            )
        name = plan.accelerator.name.casefold()
        if name not in _RAYS_NAMES and not self.resources_per_rank:
            raise ConfigurationError(
                f"accelerator={plan.accelerator.name!r}: what Ray calls such a device is not known "
                "here; pass RayLauncher(resources_per_rank={'CPU': 1, '<its name>': 1})"
            )
        device = _RAYS_NAMES.get(name)
        return {"CPU": 1.0, **({} if device is None else {device: 1.0}), **self.resources_per_rank}
