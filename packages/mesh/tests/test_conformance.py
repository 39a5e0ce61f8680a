"""The kit for strategies on a mesh whose ranks share a copy of the parameters."""

from __future__ import annotations

import pytest

from stratagem_testing import StrategyConformance

pytestmark = pytest.mark.conformance


class TestMesh(StrategyConformance):
    strategy = "mesh"
