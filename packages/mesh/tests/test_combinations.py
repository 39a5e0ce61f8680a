"""Options of a run, drawn together: exact on a mesh, or refused before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts/drawn_combinations.py"


SEEDS = (1, 3, 9, 14, 17, 19)


def outcomes(folder: Path, *seeds: int) -> dict[str, str]:
    run_file(SCRIPT, "found.json", *map(str, seeds), folder=folder, timeout=400)
    found = json.loads((folder / "found.json").read_text())
    return {seed: one["outcome"] for seed, one in found.items()}


@pytest.fixture(scope="module")
def of_seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(tmp_path_factory.mktemp("drawn"), *SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_options_are_exact_or_refused(seed: int, of_seeds: dict[str, str]) -> None:
    assert of_seeds[str(seed)].startswith(("exact", "refused"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_drawn_options_are_exact_or_refused(seed: int, tmp_path: Path) -> None:
    assert outcomes(tmp_path, seed)[str(seed)].startswith(("exact", "refused"))
