"""Manual optimization under fsdp and model_parallel: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file
from torch import nn

from stratagem import Module
from stratagem.interfaces.prepared_model import StepModule
from stratagem_torch.sharding.layout import find_replicated
from stratagem_torch.sharding.parts import find_roots

SCRIPT = Path(__file__).parents[1] / "scripts" / "fsdp_manual.py"
WAYS = ("fsdp", "groups", "mesh", "deferred")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("manual")
    run_file(SCRIPT, "2", folder=folder, env={"PYTHONPATH": str(SCRIPT.parent.parent)})
    return [json.loads(file.read_text()) for file in sorted(folder.glob("out*.json"))]


@pytest.mark.parametrize("way", WAYS)
def test_a_gan_trains_as_in_one_process(way: str, ranks: list[dict[str, Any]]) -> None:
    """Several forward and backward passes a step, a gradient penalty, accumulation, clipping."""
    for rank in ranks:
        found = rank[way]
        assert found["parameters"] < 1e-6
        assert found["norms"] < 1e-6  # of the gradients that user code reads
        assert found["value"] < 1e-6
        assert found["predicted"] < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_go_to_and_from_one_process(way: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[way][f"from {way}.ckpt"] < 1e-6
        assert rank[way]["from one.ckpt"] < 1e-6
    assert ranks[0][way]["in one process"] < 1e-6


def test_each_part_is_sharded_and_the_modules_own_parameters_are_whole(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        # The critic is called by the Module and within another part.
        parts = ["generator", "critic", "blocks.0", "blocks.1", "perceptual.mix"]
        assert rank["fsdp"]["roots"] == parts
        # The Module's own, one that two parts share, and one of a part that contains another part.
        own = ["shift", "temperature", "empty", "blocks.0.weight", "perceptual.weight"]
        assert rank["fsdp"]["whole"] == own


def test_fsdp_manual_refuses_plain_backward_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["messages"]["plain"].startswith(
            "UserCodeError: loss.backward() gave the parameter 'perceptual.weight' a gradient of "
            "this rank alone: the parameter is whole on every rank, and only "
            "self.manual_backward(loss) (lite.backward(loss) under Lite) averages its gradients"
        )
        assert rank["messages"]["late"] == (
            "ConfigurationError: Late.automatic_optimization was set to False after the model was "
            "sharded for automatic optimization: set it in Late.__init__, and train a new Late"
        )


class Two(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(1, 1)

    def forward(self) -> None:
        """Never called here."""


def test_parts_have_no_module_in_common() -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            shared = nn.Linear(1, 1)
            self.one, self.other, self.last = Two(shared), Two(shared), nn.Linear(1, 1)
            self.last.bias = self.one.own.bias

    model = Manual()
    names = {part: name for name, part in model.named_modules()}
    roots = find_roots(StepModule(model))
    assert [names[part] for part in roots] == ["one.inner", "one.own", "other.own", "last"]
    assert find_replicated(model) == [model.last.bias]
    model.automatic_optimization = True
    whole = StepModule(model)
    assert find_roots(whole) == [whole]
