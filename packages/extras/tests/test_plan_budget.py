"""recompute_within: the least recomputation that fits, beside what a real step holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from stratagem import Lite
from stratagem.errors import ConfigurationError
from stratagem.strategies import Recompute, apply_activation_checkpointing
from stratagem_extras.planner.budget import recompute_within
from stratagem_extras.planner.simulation import Workload, measure_step
from stratagem_extras.planner.training import default_loss, optimizer_maker

LAYERS = 8


def build() -> nn.Module:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(LAYERS))
    )


BATCH = torch.zeros(8, 64, 32)


def held(choice: Recompute | None) -> int:
    lite = Lite(accelerator="cpu")
    lite.launch()

    def model() -> nn.Module:
        made = build()
        apply_activation_checkpointing(made, choice)
        return made

    workload = Workload(lambda: BATCH.clone(), default_loss, optimizer_maker("AdamW"))
    return max(m.total for m in measure_step(lite.strategy, workload, model).values())


def test_a_smaller_budget_takes_more_recomputation_and_is_kept() -> None:
    free = recompute_within(build, BATCH, "1GB")
    assert (free.choice, free.layers, free.flops) == (None, 0, 0.0)
    assert free.peak == free.without == pytest.approx(held(None), rel=0.1)
    found = []
    for part in (0.9, 0.7, 0.4):
        budget = part * free.without / 0.9
        plan = recompute_within(build, BATCH, budget)
        assert plan.choice is not None
        assert plan.peak <= 0.9 * budget
        real = held(plan.choice)
        assert plan.peak == pytest.approx(real, rel=0.1)
        # One layer less would not do.
        if plan.layers > 1:
            less = Recompute(keep=plan.choice.keep, share=(plan.layers - 1) / LAYERS)
            assert held(less) > 0.9 * budget
        found.append(plan)
    kinds: list[Any] = [plan.choice and plan.choice.keep for plan in found]
    assert kinds == ["matmul", "matmul", None]
    assert found[0].layers < found[1].layers
    assert found[0].flops == found[1].flops == 0.0
    assert 0.1 < found[2].flops < 0.4
    assert found[0].peak > found[1].peak > found[2].peak


def test_shards_are_counted() -> None:
    whole = recompute_within(build, BATCH, "1GB", strategy="ddp", devices=2)
    shards = recompute_within(build, BATCH, "1GB", strategy="fsdp", devices=2)
    assert shards.peak < whole.peak


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    with pytest.raises(ConfigurationError, match="cannot be met under strategy") as caught:
        recompute_within(build, BATCH, "1MB")
    least = re.search(r"takes a budget of (\d+) bytes", str(caught.value))
    assert least is not None
    enough = recompute_within(build, BATCH, int(least[1]))
    assert enough.layers == LAYERS
    with pytest.raises(ConfigurationError, match="has no ModuleList or Sequential of layers"):
        recompute_within(lambda: nn.Linear(64, 64), torch.zeros(4, 64), 1000)


def test_a_strategy_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be planned: it is not for 2 device"):
        recompute_within(build, BATCH, "1GB", devices=2)
