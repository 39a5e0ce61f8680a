"""The accelerators mps and xpu, on a simulated device that has torch's functions for theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

from stratagem_testing.components.check import checks_of
from stratagem_testing.components.component import Component
from stratagem_testing.components.server import Server

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow]


def built() -> None:
    """Build the simulated device, or skip if there is no compiler."""
    pytest.importorskip("torch.utils.cpp_extension")
    sys.path.insert(0, str(HERE))
    from simulated.build import build, compiler

    sys.path.remove(str(HERE))
    if compiler() is None:
        pytest.skip("no C++ compiler for the simulated device; `nox -s tests` runs it with one")
    build()


@pytest.fixture(scope="module", params=["mps", "xpu"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    built()
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    path = {"PYTHONPATH": str(HERE)}
    done = run_file(HERE / "run_played.py", str(folder), name, folder=folder, env=path)
    return {"name": name, **json.loads(done.stdout.splitlines()[-1])}


def test_played_gpu_trains_like_the_cpu(run: Any) -> None:
    assert run["differ by"] < 1e-6
    assert run["devices"] == ["sim:0"]
    assert run["dtypes"] == [["torch.float32"], ["torch.bfloat16"]]


def test_a_run_with_dropout_resumes_bit_for_bit(run: Any) -> None:
    assert run["resumed"]


def test_values_of_all_steps_are_logged_and_the_devices_memory(run: Any) -> None:
    """On mps without any tensor of float64, in which they are added elsewhere."""
    assert run["logged differ by"] < 1e-6
    names = {name.rpartition("/")[2] for name in run["logged"].split(",")}
    assert {"loss_step", "loss_epoch", "allocated_bytes", "reserved_bytes"} <= names
    assert ("recommended_bytes" in names) == (run["name"] == "mps")
    assert ("peak_allocated_bytes" in names) == (run["name"] == "xpu")
    assert run["float64"].startswith("TypeError") == (run["name"] == "mps")


def test_full_memory_is_reported_with_advice(run: Any) -> None:
    assert "is out of memory: the device has 16.00 MiB" in run["full"]
    assert "64.00 MiB  more was asked for" in run["full"]
    advice = "torch's allocator stops at PYTORCH_MPS_HIGH_WATERMARK_RATIO times the memory"
    assert (advice in run["full"]) == (run["name"] == "mps")


def test_another_device_is_refused(run: Any) -> None:
    assert run["other device"].startswith("ConfigurationError: ")
    assert run["other device"].partition(", received ")[2].startswith("cpu")
    second = "no error" if run["name"] == "xpu" else "ConfigurationError: MPSAccelerator expected"
    assert run["second"].startswith(second)


# ---------------------------------------------------------------- the kit for accelerators


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    built()
    made = Server(search_path=(str(HERE),))
    yield made
    made.close()


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["mps", "xpu"])
@pytest.mark.parametrize("check", list(checks_of("accelerator")))
def test_played_gpu_passes_the_accelerator_kit(check: str, name: str, server: Server) -> None:
    options = {"tolerance": 1e-5, "devices": 1 if name == "mps" else 2}
    place = f"{HERE / 'played.py'}:{name}"
    component = Component(kind="accelerator", name=place, options=options, search_path=(str(HERE),))
    assert server.failure(component, check) == ""
