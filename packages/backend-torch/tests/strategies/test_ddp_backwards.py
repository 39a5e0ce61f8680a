"""Several backward passes, and bare ones, under DDP: the numbers of one process, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = (Path(__file__).parents[1] / "scripts" / "ddp_backwards.py").read_text()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """Return the results of one process and of both ranks."""
    folder = tmp_path_factory.mktemp("backwards")
    (folder / "script.py").write_text(SCRIPT)
    (one,), two = (
        json.loads(run_file(folder / "script.py", ranks, folder=folder).stdout.splitlines()[-1])
        for ranks in ("1", "2")
    )
    return (one, *two)


def test_each_backward_has_the_gradients_of_one_process(
    results: tuple[dict[str, Any], ...],
) -> None:
    one, *ranks = results
    assert len(one) == 42
    for name, value in one.items():
        assert [rank[name] for rank in ranks] == pytest.approx([value] * 2, abs=1e-4), name
        assert ranks[0][name] == ranks[1][name], name


def test_a_static_graph_takes_one_backward_for_each_forward(
    results: tuple[dict[str, Any], ...],
) -> None:
    one_each = (
        "static_graph=True expects one backward pass for each forward pass of the model, received "
        "another one: add the losses and run backward once, or leave static_graph=True out of "
        "DDPStrategy(...)"
    )
    for rank in results[1:]:
        assert rank["refused, static"] == rank["refused, static, bare"] == one_each
        assert rank["refused, static, penalty"] == (
            "torch.autograd.grad ran through the model's output in the first step, and "
            "static_graph=True takes the first pass through it for the backward of the loss: leave "
            "static_graph=True out of DDPStrategy(...)"
        )
        assert rank["refused, static, manual"] == (
            "static_graph=True expects one backward pass after each forward pass, and with "
            "automatic_optimization = False training_step runs them within it: leave "
            "static_graph=True out of DDPStrategy(...), or pass find_unused_parameters=True if "
            "some parameters are not used"
        )


def test_a_step_on_gradients_that_are_not_reduced_is_refused(
    results: tuple[dict[str, Any], ...],
) -> None:
    for rank in results[1:]:
        for name, unused in (("half", "b.0.weight, b.0.bias"), ("unused", "heads.1.weight")):
            assert rank[f"refused, {name}"].startswith(
                "the loss did not depend on every parameter, so DDP still waits for gradients: "
                f"unused: {unused}"
            )
