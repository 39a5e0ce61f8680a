"""Offload with DeepSpeed's compiled ops (`nox -s deepspeed_ops`): building them takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ops]

HERE = Path(__file__).parent


def launch(what: str, folder: Path) -> dict[str, Any]:
    dropped = ("RANK", "WORLD", "MASTER", "NODE", "STRATAGEM", "TORCHELASTIC", "THP_", "MALLOC")
    environment = {k: v for k, v in os.environ.items() if not any(part in k for part in dropped)}
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "deepspeed_ops.py"), what],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,  # the first time, for the build
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found: dict[str, Any] = json.loads((folder / "out0.json").read_text())
    return found


def difference(values: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


def test_an_offloaded_adamw_becomes_deepspeeds_with_the_losses_of_ddp(tmp_path: Path) -> None:
    found = launch("cpu_adam", tmp_path)
    for stage in (1, 2, 3):
        way = f"deepspeed_stage_{stage}_offload"
        assert found[f"{way} optimizer"] == "DeepSpeedCPUAdam"
        for options in (0, 2):  # plain; accumulated and clipped
            assert difference(found[f"{way} {options}"], found[f"ddp {options}"]) <= 1e-5


def test_nvme_offload_writes_files_and_trains_as_cpu_offload(tmp_path: Path) -> None:
    found = launch("async_io", tmp_path)
    assert found["optimizer files"] > 0
    assert found["both in bf16 files"] > found["cpu in bf16 files"] == 0
    assert difference(found["optimizer"], found["cpu"]) <= 1e-6
    assert difference(found["both in bf16"], found["cpu in bf16"]) <= 1e-6
