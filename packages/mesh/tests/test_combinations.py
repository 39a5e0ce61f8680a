"""Options of a run, drawn together: exact on a mesh, or refused before the first step."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts/drawn_combinations.py"

EXACT = (3, 5, 9, 25, 214, 265, 355, 485)
REFUSED = (0, 14, 18, 22, 27, 31, 202, 298, 404, 465)
LONG = (*range(140, 200), *range(400, 460))


def outcomes(folder: Path, *seeds: int) -> dict[str, str]:
    run_file(SCRIPT, "found.json", *map(str, seeds), folder=folder, timeout=400)
    found = json.loads((folder / "found.json").read_text())
    return {seed: one["outcome"] for seed, one in found.items()}


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("drawn_combinations", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


@pytest.fixture(scope="module")
def of_seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(tmp_path_factory.mktemp("drawn"), *EXACT, *REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", EXACT)
def test_drawn_options_equal_one_process(seed: int, of_seeds: dict[str, str]) -> None:
    assert of_seeds[str(seed)].startswith("exact")


@pytest.mark.slow
@pytest.mark.parametrize("seed", REFUSED)
def test_options_that_cannot_be_exact_are_named_before_a_step(
    seed: int, of_seeds: dict[str, str]
) -> None:
    assert of_seeds[str(seed)].startswith("refused")


def test_draws_have_each_option_that_is_refused(script: Any) -> None:
    draws = {seed: script.draw(seed) for seed in LONG}
    words = {seed: script.refused_words(drawn) for seed, drawn in draws.items()}
    counts = Counter(word for found in words.values() for word in found)
    assert set(counts) == set(script.REFUSED)
    assert 12 <= sum(bool(found) for found in words.values()) <= 40


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
def test_more_drawn_options_are_exact_or_refused(seed: int, tmp_path: Path) -> None:
    assert outcomes(tmp_path, seed)[str(seed)].startswith(("exact", "refused"))
