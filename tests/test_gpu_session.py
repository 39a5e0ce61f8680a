"""The tests and benchmarks for GPUs stand ready, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILED = ("msgpack", "ninja", "numpy", "psutil", "pydantic-core", "xxhash")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_gpu_session_fails_without_a_gpu() -> None:
    done = run("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
    assert done.returncode == 4
    assert "-m gpu runs the tests that need a GPU, and torch" in done.stderr


def test_a_bundle_has_all_plugins_for_a_python_that_has_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    left_out = [word for name in COMPILED for word in ("--without", name)]
    done = run("benchmarks/gpu_bundle.py", str(target), *left_out)
    assert done.returncode == 0, done.stderr
    assert f"    export PYTHONPATH={target}\n    python3 -m pytest -m gpu\n" in done.stdout
    # -S: without this environment's own packages.
    code = (
        "import stratagem, pytest; from stratagem.discovery.registry import get_registry\n"
        "names = get_registry().names('strategy'); print(stratagem.__file__, *names)"
    )
    done = run("-S", "-c", code, PYTHONPATH=str(target))
    where, *strategies = done.stdout.split()
    assert Path(where).is_relative_to(target)
    assert {"ddp", "fsdp", "deepspeed_stage_3", "xla_fsdp", "hpu_parallel"} <= set(strategies)


def test_the_benchmark_of_a_gpu_runs_on_the_cpu_to_be_tried() -> None:
    done = run("-W", "error", "benchmarks/gpu.py", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stderr
    titles = [line.partition(":")[0] for line in done.stdout.splitlines()[1:]]
    assert titles == ["step", "small step", "loader", "waits"]


def test_gpu_benchmark_without_a_gpu_fails_with_a_message() -> None:
    done = run("benchmarks/gpu.py")
    assert done.returncode == 1
    assert done.stderr.startswith("there is no GPU that torch can use; try with --device cpu")
