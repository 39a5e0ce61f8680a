"""Modules whose first outputs are right although their sequence cannot be divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts" / "context_faults.py"
APART = "UserCodeError after 0 steps: 'body' ({}) computes something else when ranks divide"
REFUSED = {
    "ZeroPositions": APART.format("ZeroPositions"),
    "ZeroScale": APART.format("ZeroScale"),
    "InTraining": APART.format("InTraining"),
    "Buffer": APART.format("Buffer"),
    "Attribute": "UserCodeError after 0 steps: body keeps a tensor with a gradient in its "
    "attribute 'penalty', and each rank of the context axis computes a part of 'body'",
    "LayerDrop": "ConfigurationError after 0 steps: context parallelism divides 'body' (LayerDrop) "
    "along the sequence, and body has layerdrop=0.5",
    "Penalized": "UserCodeError after 0 steps: context=2: a loss has gradients of gradients "
    "through a module whose sequence is divided",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("faults")
    run_file(SCRIPT, "out.json", folder=folder)
    found: dict[str, str] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_fault_that_zeros_or_evaluation_hide_is_refused(
    kind: str, messages: dict[str, str]
) -> None:
    assert messages[kind].startswith(REFUSED[kind])


@pytest.mark.slow
def test_a_module_with_zeros_and_dropout_trains(messages: dict[str, str]) -> None:
    assert messages["Right"] == "2 steps"
