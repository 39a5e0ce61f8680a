"""Runs that are drawn at random go on from each of their checkpoints as if nothing had happened.

Weights, optimizers, schedulers, logged values, callbacks and files are compared with those of the
run that was not interrupted. `nox -s resumes` draws more of them.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
from fixtures import run_file

FOLDER = Path(__file__).parent / "drawn_runs"
CASES = int(os.environ.get("STRATAGEM_RESUME_CASES", "8"))
SEED = int(os.environ.get("STRATAGEM_RESUME_SEED", "1"))
STRATEGIES, AT_ONCE = 8, 5


def batches() -> list[list[int]]:
    """Return the numbers of cases that one launch trains; they have the same strategy."""
    of_strategies = [range(first, CASES, STRATEGIES) for first in range(STRATEGIES)]
    return [
        list(numbers[at : at + AT_ONCE])
        for numbers in of_strategies
        for at in range(0, len(numbers), AT_ONCE)
    ]


@pytest.mark.parametrize(
    "accelerator",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("numbers", batches(), ids=lambda numbers: "-".join(map(str, numbers)))
def test_a_resumed_run_is_the_uninterrupted_one(
    numbers: list[int], accelerator: str, tmp_path: Path
) -> None:
    resumes = 0
    run_file(
        FOLDER / "run.py",
        str(tmp_path),
        accelerator,
        str(SEED),
        *map(str, numbers),
        folder=tmp_path,
        timeout=900,
    )
    for path in sorted(tmp_path.glob("*-*.json")):
        result = json.loads(path.read_text())
        for checkpoint, said in result["resumes"].items():
            assert not said, f"case {path.stem}, resumed from {checkpoint}, seed {SEED}: {said[:5]}"
            resumes += 1
    assert resumes >= 3 * len(numbers)


def test_cases_are_drawn_from_a_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    case = importlib.import_module("case")
    drawn = [case.draw(3, number) for number in range(200)]
    assert drawn == [case.draw(3, number) for number in range(200)]
    assert len(case.RANKS) == STRATEGIES
    for name, values in (("strategy", case.RANKS), ("data", case.DATA), ("monitor", case.VALUES)):
        assert {getattr(one, name) for one in drawn} == set(values)
    assert {name for one in drawn for name in one.callbacks} == set(case.CALLBACKS)
    limits = {name for one in drawn for name in one.limits}
    assert limits == {"max_steps", "min_steps", "min_epochs"}
