"""The conformance kit on ddp, whose ranks Ray starts."""

from __future__ import annotations

from stratagem.strategies import DDPStrategy
from stratagem.testing import StrategyConformance

pytest_plugins = ["stratagem.testing.plugin"]


def ddp_by_ray() -> DDPStrategy:
    """Return what is tested; ranks find it by this name."""
    return DDPStrategy(launcher="ray")


class TestDDPByRay(StrategyConformance):
    strategy = ddp_by_ray
