"""The conformance kit on the launcher, its environment, and ddp whose ranks Ray starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem.launch import free_port, rank_environment
from stratagem.strategies import DDPStrategy
from stratagem_ray import RayLauncher
from stratagem_testing import (
    ClusterEnvironmentConformance,
    LauncherConformance,
    StrategyConformance,
)


@pytest.fixture(scope="module", autouse=True)
def on_the_cluster(cluster: dict[str, str]) -> Iterator[None]:
    """Let the kit's programs find the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.items():
            patch.setenv(name, value)
        yield


def ddp_by_ray() -> DDPStrategy:
    """Return what is tested; ranks find it by this name."""
    return DDPStrategy(launcher="ray")


def not_again() -> RayLauncher:
    """Return a launcher that ends with the first rank that is lost, as the kit expects."""
    return RayLauncher(max_restarts=0)


class TestDDPByRay(StrategyConformance):
    strategy = ddp_by_ray


class TestRayLauncher(LauncherConformance):
    launcher = not_again


PORT = free_port()


class TestRayEnvironment(ClusterEnvironmentConformance):
    cluster_environment = "ray_ranks"
    ranks = tuple(
        {
            **rank_environment(
                local_rank=rank,
                local_world_size=2,
                main_port=PORT,
                cluster_environment="ray_ranks",
            ),
            "STRATAGEM_RAY_RUN": "conformance",
            "STRATAGEM_RAY_RESTARTS": "0",
        }
        for rank in range(2)
    )
