"""float8 and bitsandbytes in several processes: strategies, and weights that come back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

from stratagem_cuda.precision.requirement import TORCHAO_MX

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchao", "bitsandbytes"))),
    reason="torchao and bitsandbytes are not both installed",
)


needs_mxfp8 = pytest.mark.skipif(
    bool(TORCHAO_MX.why_not("mxfp8")), reason="torchao is not installed, or too old for MXFP8"
)


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    done = run_file(SCRIPTS / script, *arguments, folder=folder, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "converted"), [("float8", 4), pytest.param("mxfp8", 3, marks=needs_mxfp8)]
)
def test_ddp_and_fsdp_compute_alike_and_load_one_anothers_checkpoints(
    precision: str, converted: int, tmp_path: Path
) -> None:
    out = run("precision_ranks.py", tmp_path, precision)
    assert out["ddp converted"] == out["fsdp converted"] == converted
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


@needs_mxfp8
def test_a_mesh_divides_layers_of_low_precision(tmp_path: Path) -> None:
    """Sums over ranks and scales of parts round otherwise, by less than the precision does."""
    out = {}
    for ranks in (1, 2):
        run_file(SCRIPTS / "precision_mesh.py", str(ranks), folder=tmp_path, timeout=300)
        out[ranks] = json.loads((tmp_path / f"found{ranks}.json").read_text())
    exact = out[1]["bf16-mixed"]
    for name in out[1].keys() - {"bf16-mixed"}:
        assert out[2][name]["kinds"] == out[1][name]["kinds"]
        near = pytest.approx(out[1][name]["losses"], rel=TOLERANCES[name])
        assert out[2][name]["losses"] == near, name
        assert out[2][name]["losses"] != exact["losses"]
    kinds = {name: found["kinds"] for name, found in out[2].items()}
    assert set(kinds["float8, rowwise"]) == {"Float8Linear"}
    assert set(kinds["mxfp8"]) == {"MXFP8Linear"}
    # Parts of 8 features are no multiple of 16, and parts of 16 none of 32: they are in bfloat16.
    assert out[2]["mxfp8, small parts"]["losses"] == out[2]["bf16-mixed, 32"]["losses"]
    assert out[2]["float8, small parts"]["losses"] == out[2]["bf16-mixed, 16"]["losses"]


TOLERANCES = {
    "bf16-mixed, 16": 5e-4,
    "bf16-mixed, 32": 5e-4,
    "float8, rowwise": 1e-3,
    "float8, tensorwise": 5e-3,
    "float8, small parts": 5e-3,
    "mxfp8": 5e-4,
    "mxfp8, small parts": 5e-3,
}


def test_quantised_weights_come_back_from_new_processes(tmp_path: Path) -> None:
    out = run("precision_fork.py", tmp_path)
    assert out == {"kind": "uint8", "has trained": True, "evaluated": 2}
