"""Our own strategies pass the kit that authors of strategies run against theirs."""

from __future__ import annotations

import pytest

from stratagem.testing import StrategyConformance

pytest_plugins = ["stratagem.testing.plugin"]


class TestDDP(StrategyConformance):
    strategy = "ddp"


# The others take a minute or two each: `nox -s conformance`.


@pytest.mark.conformance
class TestSingleDevice(StrategyConformance):
    strategy = "single_device"


@pytest.mark.conformance
class TestSpawnedDDP(StrategyConformance):
    strategy = "ddp_spawn"


@pytest.mark.conformance
class TestFSDP(StrategyConformance):
    strategy = "fsdp"


@pytest.mark.conformance
class TestDDPSharded(StrategyConformance):
    strategy = "ddp_sharded"


@pytest.mark.conformance
class TestModelParallel(StrategyConformance):
    strategy = "model_parallel"
