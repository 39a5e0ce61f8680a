"""The kit for strategies on meshes: ranks that share parameters, and stages of a pipeline."""

from __future__ import annotations

import pytest

from stratagem_mesh import MeshStrategy
from stratagem_testing import StrategyConformance

pytestmark = pytest.mark.conformance


def pipeline() -> MeshStrategy:
    """Return a pipeline of two stages."""
    return MeshStrategy(pipeline=2)


class TestMesh(StrategyConformance):
    strategy = "mesh"


class TestPipeline(StrategyConformance):
    strategy = pipeline
    data_groups = 1  # the stages read the same batches
    group_grows = False  # more ranks are more pipelines of two stages
    own_methods = ("waiting_share",)
