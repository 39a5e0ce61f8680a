"""`MeshStrategy(check=True)`: a copy of the model is compared before training."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts/mesh_before.py"
ADVICE = (
    ". Divide fewer layers (tensor_plan, context_modules), or set the axis to 1; `stratagem mesh "
    "check` compares a whole step. check=False trains without this comparison"
)
RIGHT = {"numbers": True, "names": True, "dtype": "torch.float32", "gradients": False}
MISTAKES = {
    "wrong in a kind": "the output of 'layers.4' (Layer) differs by 1.0e+00",
    "a gradient summed twice": "the gradient of 'norm.0.bias' differs by",
    "a gradient of a part": "the gradient of 'attention.norm.bias' differs by",
    "a mask dropped": "the output of 'encoder' (TransformerEncoder) differs by",
    "labels cut before the shift": "the output of 'scores' (Scores) differs by",
    "a tied weight divided twice": "the gradient of 'head.weight' differs by",
}

pytestmark = pytest.mark.slow

of_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: `nox -s huggingface` runs it"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("before")
    run_file(SCRIPT, "found.json", folder=folder, timeout=400)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        *("right", "right, sequence parallel", "nothing, tensor", "nothing, tied"),
        *("nothing, context", "nothing, labels", "off"),
    ],
)
def test_a_right_model_is_set_up_as_without_the_comparison(name: str, found: Any) -> None:
    assert found[name] == RIGHT


@of_transformers
@pytest.mark.parametrize("name", ["tensor", "context", "sequence and loss parallel"])
def test_a_model_of_transformers_brings_its_example(name: str, found: Any) -> None:
    assert found[f"llama, {name}"] == RIGHT


def test_a_model_on_the_meta_device_draws_its_values_once(found: Any) -> None:
    assert {**found["on meta"], "numbers": True} == RIGHT


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_names_the_first_module_or_parameter_that_differs(name: str, found: Any) -> None:
    assert MISTAKES[name] in found[name]
    assert found[name].endswith(ADVICE)
    assert "than in one process: in float64, for a copy" in found[name]


def test_an_error_says_that_layers_are_left_out(found: Any) -> None:
    assert (
        "stratagem.errors.UserCodeError: Deep computes something else on tensor 2 than in one "
        "process: in float64, for a copy with 2 layers of each kind, the output of 'layers.4' "
        "(Layer) differs by 1.0e+00 of its largest value"
    ) in found["wrong in a kind"]


@of_transformers
def test_labels_of_a_model_of_transformers_are_compared(found: Any) -> None:
    assert "for a copy, the loss differs by" in found["llama, labels cut"]


def test_an_error_on_one_rank_is_raised_on_all(found: Any) -> None:
    assert (
        "UserCodeError: rank 1: MeshStrategy(check=True) ran a copy of the model in float64, and "
        "it raised ValueError: no luck. Pass another example_input, or check=False"
    ) in found["one rank fails"]


def test_a_model_without_an_example_is_refused(found: Any) -> None:
    assert found["no example"].endswith(
        "ConfigurationError: MeshStrategy(check=True) runs Net before training, and it brings no "
        "example of an input: pass example_input= what forward takes, set example_input_array of "
        "the model, or pass check=False"
    )
