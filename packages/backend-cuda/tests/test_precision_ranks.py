"""float8 and bitsandbytes in several processes: strategies, and weights that come back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchao", "bitsandbytes"))),
    reason="torchao and bitsandbytes are not both installed",
)


def run(script: str, folder: Path) -> dict[str, Any]:
    done = run_file(SCRIPTS / script, folder=folder, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_ddp_and_fsdp_compute_alike_and_load_one_anothers_checkpoints(tmp_path: Path) -> None:
    out = run("precision_ranks.py", tmp_path)
    assert out["ddp converted"] == out["fsdp converted"] == 4
    assert out["fsdp"] == pytest.approx(out["ddp"], rel=1e-6)
    assert out["fsdp built in shards"] == out["fsdp"]
    assert out["ddp names"]
    assert out["fsdp names"]
    assert out["ddp to fsdp"] == pytest.approx(out["fsdp to fsdp"], rel=1e-6)
    assert out["ddp to fsdp"][0] < out["ddp"][0]
    assert out["nf4 alike"]
    assert out["nf4 fsdp"] == pytest.approx(out["nf4 ddp"], rel=1e-6)
    assert out["nf4 fsdp bytes"] * 2 == out["nf4 ddp bytes"] == 32 * 32 // 2
    assert out["nf4 ddp to fsdp"] == pytest.approx(out["nf4 fsdp to fsdp"], rel=1e-6)
    assert out["nf4 ddp to fsdp"][0] < out["nf4 ddp"][0]
    assert out["nf4 built in shards"]
    for mode in ("fp4", "int8", "int8-training"):
        # Gradients are summed in 16 bits, in another order.
        assert out[f"{mode} fsdp"] == pytest.approx(out[f"{mode} ddp"], rel=1e-4)


def test_quantised_weights_come_back_from_new_processes(tmp_path: Path) -> None:
    out = run("precision_fork.py", tmp_path)
    assert out == {"kind": "uint8", "has trained": True, "evaluated": 2}
