"""Checkpoints of meshes in one process, fsdp, DeepSpeed and other meshes, and theirs in meshes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts/mesh_checkpoints.py"
DEEPSPEED = "deepspeed_stage_3"
EIGHT = "pipeline 2 x shard 2 x tensor 2"
WRITERS = (
    *("one process, single_file", "fsdp, directory", "context 2, directory"),
    *("shard 2 x tensor 2, directory", "pipeline 2 x tensor 2, single_file"),
    *("virtual stages 2, directory", f"{DEEPSPEED}, single_file"),
)
READERS = (
    *("one process", "fsdp", "tensor 2", "context 2", "shard 2 x tensor 2", "pipeline 2"),
    *("virtual stages 2", "pipeline 2 x shard 2", DEEPSPEED),
)
OTHERS = (
    *(f"{mesh}, {form}" for mesh in ("pipeline 2", EIGHT) for form in ("single_file", "directory")),
    *("virtual stages 2, single_file", "pipeline 2 x tensor 2, directory", "fsdp, single_file"),
    *("pipeline 2 x shard 2, directory", f"{DEEPSPEED}, directory", "one process, directory"),
)
"""Further writers."""

pytestmark = pytest.mark.slow


def present(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if DEEPSPEED not in name or find_spec("deepspeed")]


def table(folder: Path, writers: tuple[str, ...], readers: tuple[str, ...]) -> Any:
    names = "--writers", *present(writers), "--readers", *present(readers)
    run_file(SCRIPT, "found.json", *names, folder=folder, timeout=900)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return table(tmp_path_factory.mktemp("checkpoints"), WRITERS, READERS)


@pytest.mark.parametrize("writer", present(WRITERS))
@pytest.mark.parametrize("reader", present(READERS))
def test_weights_and_optimizer_state_are_read_bit_for_bit(
    writer: str, reader: str, differing: Any
) -> None:
    assert differing[writer][reader] == []


@pytest.mark.long
def test_each_mesh_reads_each_format_of_the_others_bit_for_bit(tmp_path: Path) -> None:
    readers = (*READERS, "pipeline 2 x tensor 2", EIGHT)
    found = table(tmp_path, OTHERS, readers)
    assert {writer: list(of) for writer, of in found.items()} == {
        writer: present(readers) for writer in present(OTHERS)
    }
    assert not any(names for of_writer in found.values() for names in of_writer.values())
