"""The conformance kit on ddp, whose ranks Ray starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem.strategies import DDPStrategy
from stratagem.testing import StrategyConformance

pytest_plugins = ["stratagem.testing.plugin"]


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


class TestDDPByRay(StrategyConformance):
    strategy = ddp_by_ray
