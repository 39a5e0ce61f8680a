"""`stratagem mesh check` on models that compute the same on a mesh, and on others."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import fixtures
import pytest
from fixtures import run_python
from zygote import can_fork

PROGRAM = Path(fixtures.__file__).parents[1] / "scripts/stratagem_program.py"
SUBJECTS = Path(__file__).parents[1] / "scripts"


def check(
    model: str, *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = ["mesh", "check", f"mesh_subjects:{model}", "--batch", "mesh_subjects:batch"]
    return run_python(
        (),
        PROGRAM,
        (*command, *options),
        {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        SUBJECTS,
        300,
        fresh=not can_fork(()),
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
    assert "weights read back      0.0e+00" in done.stdout


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
        ("WrongBuffer", "buffers: differs by 1.0e+00 in calls\n", "weights:"),
    ],
)
def test_a_mistake_is_found_and_its_place_named(model: str, said: str, right: str) -> None:
    done = check(model, "--tensor", "2", "--plan", "mesh_subjects:PLAN")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert not right or right not in done.stderr
    assert done.stdout.endswith("Not the numbers of one process.\n")


@pytest.mark.slow
def test_experts_that_ranks_divide_have_the_numbers_of_one_process() -> None:
    done = check(
        "Mixture",
        *("--shard", "2", "--expert", "2", "--expert-modules", "layers.*.experts"),
        *("--batch", "expert_models:batch", "--loss", "expert_models:loss"),
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == "mesh_subjects:Mixture on shard 2 with expert 2, float64 on the CPU"
    assert last == "The numbers of one process."


def test_the_training_step_of_a_module_is_compared() -> None:
    done = check("Logs", "--tensor", "2", "--plan", "mesh_subjects:PLAN")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--tensor", "2", "--plan", "mesh_subjects:PLAN", "--sequence-parallel"),
        ("--context", "2", "--context-modules", "0", "--context-modules", "1"),
    ],
)
def test_options_of_the_strategy_are_compared(options: tuple[str, ...]) -> None:
    done = check("Chain", "--batch", "mesh_subjects:sequences", *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_layers_of_each_kind_are_kept_and_compared() -> None:
    plan = ("--plan", "mesh_subjects:PLAN", "--layers", "2")
    done = check("Stack", "--tensor", "2", "--shard", "2", *plan)
    assert done.returncode == 0, done.stderr
    assert "blocks keeps layers 0, 1, 3\n" in done.stderr
    assert "embedding.weight" in done.stdout or "blocks.2." in done.stdout
    assert "blocks.3." not in done.stdout
    assert done.stdout.endswith("The numbers of one process.\n")


@pytest.mark.slow
def test_a_pipeline_with_a_tied_weight_has_the_numbers_of_one_process() -> None:
    loss = ("--loss", "mesh_subjects:loss", "--layers", "2")
    done = check("Stack", "--pipeline", "2", "--shard", "2", *loss)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == "mesh_subjects:Stack on pipeline 2 x shard 2, float64 on the CPU"
    assert last == "The numbers of one process."


@pytest.mark.slow
def test_a_value_that_a_stage_does_not_receive_is_found_in_its_first_module() -> None:
    done = check("LostBoundary", "--pipeline", "2", "--loss", "mesh_subjects:loss")
    assert done.returncode == 1, done.stderr
    assert re.search(r"outputs of modules: differs by .* in blocks.3.norm, and", done.stderr)
    assert re.search(r"gradients: differs by .* in blocks.5.down.bias, and", done.stderr)
    assert "weights read back:" not in done.stderr


REFUSED = {
    "a model that reads values while it is built": (
        ("NeedsValues", "--tensor", "2", "--plan", "mesh_subjects:PLAN", "--layers", "2"),
        "--layers builds the model without values of its parameters, and its constructor reads "
        "them (RuntimeError: Tensor.item() cannot be called on meta tensors): check a small model "
        "without --layers",
    ),
    "blocks that are not there": (
        ("Net", "--tensor", "2", "--plan", "mesh_subjects:PLAN", "--sequence-parallel"),
        "sequence_parallel=True, but Net has no blocks, which are modules of an nn.ModuleList or "
        "nn.Sequential with pairs of divided layers (colwise, then rowwise): pass "
        "sequence_parallel=False",
    ),
    "a loss of parts that the model does not compute": (
        ("Net", "--tensor", "2", "--plan", "mesh_subjects:PLAN", "--loss-parallel"),
        "loss_parallel=True, but Net has no model of transformers that computes its loss by "
        "loss_function: name the last layer in tensor_plan, such as {'head': "
        "'colwise_vocabulary'}, and compute the loss by stratagem_mesh.cross_entropy; or pass "
        "loss_parallel=False",
    ),
    "a Module with manual optimization": (
        ("Manual", "--shard", "2"),
        "Manual sets automatic_optimization=False, so that its training_step returns no loss to "
        "compare: pass --loss module:function",
    ),
    "a model without a loss": (
        ("Text", "--shard", "2"),
        "the model returned an object of type str, which has no loss: pass --loss module:function, "
        "a function (model, batch) that returns a scalar",
    ),
    "a model that is no module": (
        ("NoModule", "--tensor", "2"),
        "the model is an object of type NoModule: expected an nn.Module, or a function that "
        "returns one",
    ),
    "a loss that is not finite": (
        ("NoLoss", "--tensor", "2", "--plan", "mesh_subjects:PLAN"),
        "the loss of batch 0 is nan: expected a finite loss, since nothing can be compared with "
        "others",
    ),
    "a plan without a name": (
        ("Net", "--tensor", "2", "--plan", "mesh_subjects"),
        "--plan is 'mesh_subjects': expected module:name, found from this folder or installed",
    ),
    "a missing model": (
        ("Missing", "--shard", "2"),
        "cannot import the model 'mesh_subjects:Missing': AttributeError: module 'mesh_subjects' "
        "has no attribute 'Missing'. Expected module:name, found from this folder or installed",
    ),
    "a batch that raises": (
        ("Net", "--shard", "2", "--batch", "mesh_subjects:no_batch"),
        f"ValueError: no data ({SUBJECTS / 'mesh_subjects.py'}:LINE in no_batch)",
    ),
    "a loss that raises on one rank": (
        ("Net", "--shard", "2", "--loss", "mesh_subjects:loss_of_first_rank"),
        f"ValueError: no loss\\nhere ({SUBJECTS / 'mesh_subjects.py'}:LINE in loss_of_first_rank)",
    ),
    "heads that do not divide": (
        ("ThreeHeads", "--tensor", "2", "--plan", "mesh_subjects:PLAN"),
        "ThreeHeads has num_heads=3, which do not divide between 2 ranks: each rank computes whole "
        "heads. Choose a size of the tensor axis that divides them, or a tensor_plan without the "
        "layers of this attention",
    ),
    "a model that context refuses": (
        ("Net", "--context", "2"),
        "context=2, but Net has no model of transformers and no nn.TransformerEncoder, whose "
        "sequence the ranks would divide: pass context_modules=['NAME'] of a module that reads "
        "(batch, sequence, ...) and attends by scaled_dot_product_attention, or context=1",
    ),
}


def test_a_check_of_one_rank_is_refused() -> None:
    done = check("Net")
    assert done.returncode == 2
    assert "expected the size of an axis above 1, such as --tensor 2 --context 2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_without_a_traceback(name: str) -> None:
    arguments, message = REFUSED[name]
    done = check(*arguments)
    assert done.returncode == 2
    said = re.sub(r"\.py:\d+ in", ".py:LINE in", done.stderr)
    assert re.sub(r"error: rank \d: ", "error: ", said) == (
        f"stratagem mesh check: error: {message}\n"
    )
    assert ("rank 1: " in said) >= ("on one rank" in name)


@pytest.mark.slow
def test_full_tracebacks_show_the_frames_of_the_user() -> None:
    variables = {"STRATAGEM_FULL_TRACEBACKS": "1"}
    done = check("Net", "--shard", "2", "--batch", "mesh_subjects:no_batch", environment=variables)
    assert done.returncode == 1
    assert 'raise ValueError("no data")' in done.stderr
