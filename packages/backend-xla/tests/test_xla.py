"""Training by PyTorch/XLA on PJRT's CPU client; `nox -s xla` runs these, with torch_xla's torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DATA = HERE / "data"
DEVICES = {"single_xla": 1, "xla": 4, "xla_fsdp": 4, "single_device": 1, "ddp": 1}
UNDER_XLA = ("single_xla", "xla", "xla_fsdp")
ON_ALL = ("xla", "xla_fsdp")

pytestmark = [pytest.mark.xla, pytest.mark.slow]


def run(script: str, *arguments: object, devices: int = 1) -> tuple[Any, str]:
    """Run a script of this folder with so many XLA devices; return its result and its stderr."""
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)})
    done = subprocess.run(
        [sys.executable, "-W", "ignore:.*pin_memory.*", str(HERE / script), *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,  # minutes where a machine is busy; 40 s otherwise
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    _, found, result = done.stdout.rpartition("RESULT")
    return (json.loads(result) if found else None), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def results(folder: Path) -> Callable[[str], dict[str, Any]]:
    """What `run_strategy.py` found under a strategy; run once for each."""
    found: dict[str, dict[str, Any]] = {}

    def of(strategy: str) -> dict[str, Any]:
        if strategy not in found:
            found[strategy], _ = run("run_strategy.py", strategy, folder, devices=DEVICES[strategy])
        return found[strategy]

    return of


Results = Callable[[str], dict[str, Any]]
NUMBERS = (
    "losses",
    "two epochs",
    "accumulated, clipped",
    "clipped by value",
    "by hand",
    "uneven",
    "manual",
    "running mean",
    "resumed, single_file",
    "resumed, directory",
)
EVALUATED = ("by hand, evaluated", "validated", "predicted", "running var")
"""Under XLA these are others than on the CPU, by batch norm's running variance; see below."""


def near(one: Any, other: Any, by: float) -> bool:
    values = [value if isinstance(value, list) else [value] for value in (one, other)]
    return all(abs(a - b) <= by for a, b in zip(*values, strict=True))


@pytest.mark.parametrize("what", NUMBERS)
def test_one_xla_device_equals_the_cpu(results: Results, what: str) -> None:
    assert near(results("single_xla")[what], results("single_device")[what], by=5e-6)


def test_batch_norms_running_variance_is_torch_xlas(results: Results) -> None:
    """torch_xla takes the biased variance of each batch, torch the unbiased one (README)."""
    start = 0.9**6
    found, expected = (results(name)["running var"] for name in ("single_xla", "single_device"))
    assert near([start + 8 / 7 * (one - start) for one in found], expected, by=1e-6)


@pytest.mark.parametrize("what", [*NUMBERS, *EVALUATED])
@pytest.mark.parametrize("strategy", ON_ALL)
def test_four_xla_devices_equal_one(results: Results, strategy: str, what: str) -> None:
    # The sum of 144 predictions has their rounding errors together.
    by = 1e-5 if what == "predicted" else 1e-6
    assert near(results(strategy)[what], results("single_xla")[what], by=by)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_bfloat16_is_computed_in(results: Results, strategy: str, precision: str) -> None:
    found, expected = (results(name)[precision] for name in (strategy, "single_device"))
    assert near(found["losses"], expected["losses"], by=2e-2)
    assert found["losses"] != results(strategy)["losses"]
    assert found["computed in"] == ["torch.bfloat16"]
    assert found["parameters"] == expected["parameters"]


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_a_step_is_one_program_and_the_third_is_compiled_already(
    results: Results, strategy: str
) -> None:
    graphs = results(strategy)["graphs"]
    first_epoch = graphs["compiled by step"][:70]
    # The first step makes the optimizer's state, so it is another program than those after it.
    assert first_epoch == [1, *[2] * 69]
    # Validation is the third; the second epoch, its first step included, compiles nothing more.
    assert graphs["compiled by step"][70:] == [3] * 70
    assert graphs["compiled"] == 3


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_logging_reads_the_device_now_and_then_only(results: Results, strategy: str) -> None:
    graphs = results(strategy)["graphs"]
    assert graphs["rows"] >= 140  # each step's values are in the file
    assert graphs["read in steps"] < 20  # of 69 steps; they are read each 2 s
    assert near(graphs["epoch"], graphs["mean"], by=1e-6)


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_a_run_resumes_bit_for_bit_within_an_epoch(results: Results, strategy: str) -> None:
    expected = dict.fromkeys(("repeats", "drops", "resumes", "weights"), True)
    assert results(strategy)["bit for bit"] == expected


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_seed_everything_seeds_the_device(results: Results, strategy: str) -> None:
    assert results(strategy)["seeded"] is True


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_a_datasets_exception_is_not_a_short_epoch(results: Results, strategy: str) -> None:
    for workers in (0, 2):
        error = results(strategy)[f"failing, {workers} workers"]
        assert error.startswith("ValueError")
        assert "sample 20 cannot be read" in error


def test_fsdp_divides_parameters_and_optimizer_state(results: Results) -> None:
    divided = results("xla_fsdp")["divided"]
    assert divided["blocks.0.up.weight"] == ["{devices=[4,1]0,1,2,3}"] * 3
    assert divided["blocks.0.down.weight"] == ["{devices=[1,4]0,1,2,3}"] * 3
    assert all(spec.startswith("{devices=") for specs in divided.values() for spec in specs)


def test_fsdp_is_torch_xlas(folder: Path) -> None:
    (ours, theirs), _ = run("one_case.py", "torch_xla's FSDP", folder, devices=4)
    assert ours["divided"] == theirs["divided"]
    assert near(ours["losses"], theirs["losses"], by=1e-6)


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_names_in_a_checkpoint_are_the_models(results: Results, strategy: str) -> None:
    assert results(strategy)["names"] is True


@pytest.mark.parametrize("format", ["single_file", "directory"])
@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_ddp_goes_on_from_a_checkpoint(
    results: Results, folder: Path, strategy: str, format: str
) -> None:
    expected = results(strategy)["two epochs"][6:]
    found, _ = run("go_on.py", "ddp", folder / f"{strategy}_{format}", folder)
    assert near(found, expected, by=2e-6)


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_a_checkpoint_of_ddp_under_another_torch_goes_on(
    results: Results, folder: Path, strategy: str
) -> None:
    """The file was saved by ddp under torch 2.13."""
    expected = results("single_device")["two epochs"][6:]
    file = DATA / "ddp_torch_2_13.ckpt"
    found, _ = run("go_on.py", strategy, file, folder, devices=DEVICES[strategy])
    assert near(found, expected, by=5e-6)


def test_tied_weights_stay_tied_and_are_saved_once(folder: Path) -> None:
    assert run("one_case.py", "tied weights", folder, devices=4)[0] == [True, True]


def test_a_model_can_be_trained_by_one_strategy_after_another(folder: Path) -> None:
    (found, expected), _ = run("one_case.py", "model used before", folder, devices=4)
    assert len(found) == 24
    assert near(found, expected, by=5e-6)


def test_xla_debug_reports_compilations(folder: Path) -> None:
    _, printed = run("one_case.py", "debug", folder, devices=4)
    assert "Compilation Cause" in printed


# -- refusals


def test_a_backward_pass_before_the_launch_is_refused(folder: Path) -> None:
    error, _ = run("one_case.py", "backward before", folder)
    assert error.startswith("ConfigurationError: autograd cannot work on XLA devices")
    assert "launch before it" in error


@pytest.mark.parametrize("strategy", UNDER_XLA)
def test_one_device_and_all_of_them_do_not_go_together(results: Results, strategy: str) -> None:
    error = results(strategy)["other kind"]
    assert error.startswith("ConfigurationError: this process has used")
    assert "use one of the two in a process" in error
