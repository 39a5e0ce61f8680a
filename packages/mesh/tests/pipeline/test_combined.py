"""A pipeline with other features: what is divided by stage, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures import run_file
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.pipeline.cuts import find_stages
from stratagem_mesh.tensor.blocks import find_blocks

SCRIPT = Path(__file__).parents[1] / "scripts/pipeline_of_ranks.py"
STYLES = {
    f"blocks.{i}.{j}": style for i in range(4) for j, style in ((0, "colwise"), (2, "rowwise"))
}


def net() -> nn.Module:
    made = nn.Module()
    made.words = nn.Embedding(8, 4)
    made.blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)
    )
    made.head = nn.Linear(4, 8)
    return made


def test_sequences_are_whole_where_a_stage_ends() -> None:
    model = net()
    stages = find_stages(model, 3, ["blocks.1", "blocks.3"])
    found = find_blocks(model, STYLES, stages.units)
    assert [list(one.blocks) for one in found] == [
        ["blocks.0"],
        ["blocks.1", "blocks.2"],
        ["blocks.3"],
    ]
    assert [one.name for one in find_blocks(model, STYLES)] == ["blocks"]


def test_a_cut_inside_of_a_block_that_holds_a_part_of_a_sequence_is_refused() -> None:
    model = net()
    stages = find_stages(model, 2, ["blocks.1.2"])
    message = (
        "sequence_parallel=True, and a pipeline cuts the block 'blocks.1', of which each rank has "
        "a part of the sequence: expected pipeline_cuts between blocks, or sequence_parallel=False"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        find_blocks(model, STYLES, stages.units)


def test_a_comparison_with_a_copy_of_the_model_is_refused() -> None:
    message = (
        "check=True with pipeline=2: a stage has not all layers, to compare a copy of the model "
        "with one process: expected check=False. `stratagem mesh check --pipeline 2` compares a "
        "whole step"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        MeshStrategy(pipeline=2, check=True)


@pytest.mark.slow
def test_a_step_that_computes_something_else_on_one_rank_is_refused(tmp_path: Path) -> None:
    run_file(SCRIPT, "found.json", folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert re.search(
        r"UserCodeError: the stages of a pipeline would exchange \d tensor\(s\) by the "
        r"training_step of rank (\d), and others by that of rank (?!\1)\d: expected the same "
        r"computations on each rank of a pipeline. Leave out branches on the rank, such as `if "
        r"trainer.is_global_zero`, and hooks that some ranks have",
        found["of a rank"],
    )
