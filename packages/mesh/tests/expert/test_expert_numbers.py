"""Models with experts on meshes, beside one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/expert_numbers.py"
WRITTEN = (
    "written, expert 2",
    "written, expert 4",
    "written, shard rest 2",
    "written, replicate 2",
    "written, checked",
    "all tokens to one expert",
    "one expert on a rank",
    "written, pipeline 2",
)
OF_TRANSFORMERS = (
    "mixtral, expert 2",
    "mixtral, shard rest 2",
    "mixtral, tensor 2",
    "mixtral, context 2",
    "mixtral, shard 2 x context 2",
    "mixtral, context 2 x tensor 2",
    "mixtral, pipeline 2",
    "mixtral, pipeline 2 x context 2",
    "mixtral, grouped",
    "qwen3, expert 4",
    "qwen3, shard rest 2",
)
TRAINED = ("written, shard rest 2",)
TRAINED_OF_TRANSFORMERS = (
    "mixtral, pipeline 2, grouped",
    "mixtral, grouped",
    "mixtral, expert 2",
    "qwen3, grouped",
)

pytestmark = pytest.mark.slow
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: `nox -s huggingface` runs it"
)


def run(folder: Path, what: str, names: tuple[str, ...]) -> Any:
    cases = [f"{what}:{name}" for name in names]
    run_file(SCRIPT, "found.json", *cases, folder=folder, timeout=400)
    found = json.loads((folder / "found.json").read_text())
    return {case.partition(":")[2]: value for case, value in found.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("written"), "step", WRITTEN)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("transformers"), "step", OF_TRANSFORMERS)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_step_with_experts_written_by_hand_equals_one_process(case: str, written: Any) -> None:
    assert "gradients" in written[case]
    assert max(written[case].values()) < 1e-10


@needs_transformers
@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_a_step_with_experts_of_transformers_equals_one_process(
    case: str, of_transformers: Any
) -> None:
    assert "gradients" in of_transformers[case]
    assert max(of_transformers[case].values()) < 1e-10


def test_losses_of_fifty_steps_in_float32_equal_one_process(tmp_path: Path) -> None:
    found = run(tmp_path, "losses", TRAINED)
    assert found == {name: pytest.approx(0, abs=1e-6) for name in TRAINED}


@needs_transformers
def test_a_loss_of_routers_of_other_stages_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "step", ("mixtral, pipeline 2, router",))
    assert (
        "user code reads a tensor of the module 'model.layers.0' of stage 0 that the module does "
        "not return, and stage 1 cannot receive it: expected it among the module's results"
    ) in found["mixtral, pipeline 2, router"]


@needs_transformers
def test_losses_of_fifty_steps_equal_one_process_with_and_without_grouped_products(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, "losses", TRAINED_OF_TRANSFORMERS)
    assert found == {name: pytest.approx(0, abs=1e-6) for name in TRAINED_OF_TRANSFORMERS}
