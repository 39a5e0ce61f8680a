"""`stratagem mesh check` on models that compute the same on a mesh, and on others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUBJECTS = Path(__file__).parents[1] / "scripts"


def check(model: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["mesh", "check", f"mesh_subjects:{model}", "--batch", "mesh_subjects:batch"]
    return subprocess.run(
        [sys.executable, "-m", "stratagem", *command, *options],
        cwd=SUBJECTS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_model_has_the_numbers_of_one_process() -> None:
    done = check(
        "Net",
        *("--tensor", "2", "--shard", "2", "--plan", "mesh_subjects:PLAN"),
        *("--loss", "mesh_subjects:loss"),
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == "mesh_subjects:Net on shard 2 x tensor 2, float64 on the CPU"
    assert last == "The numbers of one process."
    assert "weights read back in one process  0.0e+00" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said", "right"),
    [
        ("WrongForward", "outputs of modules: differs by 1.0e+00 in head\n", ""),
        (
            "WrongGradient",
            "gradients: differs by 1.0e+00 in first.bias, and 1 more\n",
            "outputs of modules:",
        ),
    ],
)
def test_a_mistake_is_found_and_its_place_named(model: str, said: str, right: str) -> None:
    done = check(model, "--tensor", "2", "--plan", "mesh_subjects:PLAN")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert not right or right not in done.stderr
    assert done.stdout.endswith("Not the numbers of one process.\n")


def test_the_training_step_of_a_module_is_compared() -> None:
    done = check("Logs", "--tensor", "2", "--plan", "mesh_subjects:PLAN")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "Manual",
            "Manual sets automatic_optimization=False, so that its training_step returns no loss "
            "to compare: pass --loss module:function",
        ),
        (
            "Text",
            "the model returned an object of type str, which has no loss: pass --loss "
            "module:function, a function (model, batch) that returns a scalar",
        ),
    ],
)
def test_a_model_without_a_loss_is_refused(model: str, said: str) -> None:
    done = check(model, "--shard", "1")
    assert done.returncode != 0
    assert said in done.stderr


def test_a_missing_model_is_refused() -> None:
    done = check("Missing")
    assert done.returncode != 0
    assert "cannot import the model: target='mesh_subjects:Missing' failed" in done.stderr
