"""Our own strategies pass the kit that authors of strategies run against theirs."""

from __future__ import annotations

import pytest

from stratagem.testing import StrategyConformance

pytest_plugins = ["stratagem.testing.plugin"]


class TestDDP(StrategyConformance):
    strategy = "ddp"
