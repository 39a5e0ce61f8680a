"""DeepSpeed's stages pass the kit that authors of strategies run against theirs."""

from __future__ import annotations

import pytest

from stratagem_testing import StrategyConformance

pytestmark = pytest.mark.conformance


class TestStage1(StrategyConformance):
    strategy = "deepspeed_stage_1"
    zeros_for_unused = True


class TestStage2(StrategyConformance):
    strategy = "deepspeed_stage_2"
    zeros_for_unused = True


class TestStage3(StrategyConformance):
    strategy = "deepspeed_stage_3"
    zeros_for_unused = True
