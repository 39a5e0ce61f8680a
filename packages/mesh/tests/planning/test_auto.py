"""strategy="auto" takes a mesh where a rank cannot gather a layer, if one is known to divide it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

from stratagem import Trainer
from stratagem.discovery import get_registry
from stratagem.launch import process

SCRIPT = Path(__file__).parents[1] / "scripts/auto_strategy.py"
pytest.importorskip("transformers")


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("auto_strategy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    def plan(each: float, **options: Any) -> Trainer:
        monkeypatch.setattr(process, "host_memory", lambda: script.memory(each))
        made: Trainer = script.trainer(**options)
        made.runtime.divide(script.Net())
        return made

    return plan


@pytest.mark.slow
def test_two_ranks_train_on_a_mesh_with_the_losses_of_one_process(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_file(SCRIPT, str(out), folder=tmp_path)
    found = json.loads(out.read_text())
    assert found["strategy"] == "mesh(tensor=2)"
    assert found["sizes"] == [1, 1, 1, 1, 2]
    assert found["losses"] == pytest.approx(found["whole"], rel=1e-5)


def test_a_plan_says_the_size_of_the_layers_and_how_they_are_shared(
    planned: Callable[..., Trainer],
) -> None:
    why = planned(2.3).plan.explain()
    assert "fsdp holds 1.72 MiB, and a rank has 1.98 MiB; the layers that it gathers take" in why
    assert "on a mesh the devices of a node share each layer, 2 of 4 heads each" in why


def test_simpler_strategies_come_first(planned: Callable[..., Trainer]) -> None:
    assert planned(2.6).plan.strategy.name == "fsdp_shard_grad_op"
    assert planned(5.1).plan.strategy.name == "ddp"


def test_a_model_without_a_plan_of_layers_keeps_fsdp_and_is_told_so(
    planned: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem_mesh.planning.by_state.has_plan", lambda part: False)
    made = planned(2.3)
    assert made.plan.strategy.name == "fsdp"
    assert "no mesh is known to divide them: stratagem plan compares" in made.plan.explain()


def test_without_a_strategy_of_this_name_nothing_changes(
    planned: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(get_registry())
    has = kind.has
    monkeypatch.setattr(
        kind, "has", lambda self, group, name: name != "mesh" and has(self, group, name)
    )
    made = planned(2.3)
    assert made.plan.strategy.name == "fsdp"
    assert type(made.strategy).__name__ == "FSDPStrategy"
    assert "gathers" not in made.plan.explain()
