"""What is said, before anything is imported, of versions, devices and requests that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

from stratagem import Lite, Trainer
from stratagem.discovery import Availability
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.plan.plan import RunPlan, RunRequest
from stratagem.plan.resolution import resolve
from stratagem_xla import installation
from stratagem_xla.library import import_torch_xla
from stratagem_xla.plugin import stratagem_doctor

PAIR = "pip install torch==2.9.0 'torch_xla==2.9.0' numpy"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installation, "_PCI", tmp_path)


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put metadata of distributions on the path, and modules that must not be imported."""
    folder = tmp_path / "site"
    folder.mkdir()

    def install(**versions: str) -> None:
        for name, version in versions.items():
            info = folder / f"{name}-{version}.dist-info"
            info.mkdir()
            info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
            folder.joinpath(f"{name}.py").write_text("raise SystemExit('it was imported')\n")

    monkeypatch.syspath_prepend(str(folder))
    return install


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch_xla and its torch were there."""
    monkeypatch.setattr(installation, "version_problem", lambda: "")


def attach(folder: Path, *chips: str) -> None:
    for number, device in enumerate(chips):
        place = folder / f"0000:00:0{number}.0"
        place.mkdir()
        place.joinpath("vendor").write_text("0x1ae0\n")
        place.joinpath("device").write_text(f"{device}\n")


# -- versions


def test_missing_torch_xla_names_the_pip_command() -> None:
    expected = f"torch_xla is not installed; in an environment of its own: {PAIR}"
    assert installation.version_problem() == expected
    assert installation.availability() == Availability(0, expected)


@pytest.mark.parametrize(
    ("torch", "torch_xla", "expected"),
    [
        ("2.13.0", "2.9.0", "torch_xla 2.9.0 needs torch 2.9, and 2.13.0 is installed; "),
        ("2.8.0", "2.8.0", "this backend is made for torch_xla 2.9, and 2.8.0 is installed; "),
        ("2.9.1+cpu", "2.9.0", ""),
    ],
)
def test_versions_are_read_from_metadata(
    install: Install, torch: str, torch_xla: str, expected: str
) -> None:
    install(torch=torch, torch_xla=torch_xla)
    problem = installation.version_problem()
    assert problem == (f"{expected}in an environment of its own: {PAIR}" if expected else "")


def test_where_a_tpu_is_the_command_brings_libtpu(tmp_path: Path) -> None:
    attach(tmp_path, "0x0063")
    assert installation.install_command() == PAIR.replace("_xla==", "_xla[tpu]==")


def test_mismatched_torch_xla_raises_configuration_error(install: Install) -> None:
    install(torch="2.13.0", torch_xla="2.9.0")
    with pytest.raises(
        ConfigurationError, match=r"PyTorch/XLA cannot be used here: torch_xla 2\.9"
    ):
        import_torch_xla()


# -- devices


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(
    ("variables", "count", "reason"),
    [
        ({}, 0, "PJRT_DEVICE is not set (no TPU is attached to this machine): set PJRT_DEVICE=TPU"),
        ({"PJRT_DEVICE": "CPU"}, 1, "1 devices of PJRT's CPU client: the processor, not a TPU"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, 4, "4 devices of PJRT's CPU client"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "x"}, 0, "CPU_NUM_DEVICES='x': expected a num"),
        ({"PJRT_DEVICE": "TPU"}, 0, "PJRT_DEVICE=TPU, and no TPU is attached to this machine"),
        ({"PJRT_DEVICE": "NEURON"}, 0, "PJRT_DEVICE='NEURON': expected 'TPU', or 'CPU' to try it"),
    ],
)
def test_devices_are_counted_without_the_runtime(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, reason: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = installation.availability()
    assert found.count == count
    assert found.reason.startswith(reason)


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(
    ("chips", "visible", "count"),
    [(["0x0063"] * 4, None, 4), (["0x0027"] * 4, None, 8), (["0x0063"] * 4, "0,2", 2)],
)
def test_tpu_devices_are_counted_by_pci(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chips: list[str],
    visible: str | None,
    count: int,
) -> None:
    attach(tmp_path, *chips)
    found = sum(2 if chip == "0x0027" else 1 for chip in chips)
    unset = f"PJRT_DEVICE is not set ({found} TPU devices are here)"
    assert installation.availability().reason.startswith(unset)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    if visible is not None:
        monkeypatch.setenv("TPU_VISIBLE_CHIPS", visible)
    assert installation.availability().reason.startswith("libtpu is not installed: pip install")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/somewhere/libtpu.so")
    assert installation.availability().count == count


# -- what is planned


def planned(**options: Any) -> RunPlan:
    return resolve(RunRequest(**options), get_registry())


@pytest.fixture
def four(working: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")


@pytest.fixture
def one(working: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "xla"),
        ({"accelerator": "tpu"}, "xla"),
        ({"accelerator": "xla", "devices": 4}, "xla"),
        ({"strategy": "tpu_spawn"}, "xla"),
        ({"strategy": "xla_fsdp", "devices": "4"}, "xla_fsdp"),
        ({"strategy": "xla_debug", "devices": -1}, "xla_debug"),
    ],
)
def test_all_devices_are_taken_by_one_process(options: dict[str, Any], strategy: str) -> None:
    plan = planned(**options)
    assert (plan.strategy.name, plan.accelerator.name) == (strategy, "tpu")
    assert (plan.devices, plan.processes_per_node) == ((0, 1, 2, 3), 1)


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("devices", ["auto", 1, "1", [0]])
def test_one_device_is_single_xlas(devices: Any) -> None:
    plan = planned(accelerator="tpu", devices=devices)
    assert (plan.strategy.name, plan.devices) == ("single_xla", (0,))


def test_devices_of_the_accelerator_tpu_are_xlas(
    working: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attach(tmp_path, *["0x0027"] * 4)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/somewhere/libtpu.so")
    tpu: dict[str, Any] = {"accelerator": "tpu"}
    for made in (Lite(**tpu, devices=8), Trainer(**tpu, devices=8, logger=False)):
        assert made.plan.strategy.name == "xla"
        assert made.plan.devices == tuple(range(8))
    with pytest.raises(ConfigurationError, match="drives all 8 XLA devices"):
        Lite(**tpu, devices=4)
    assert Lite(**tpu, devices=[3]).plan.devices == (3,)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "single_device", "fsdp"])
def test_strategies_that_know_nothing_of_xla_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        planned(strategy=strategy, accelerator="tpu")
    assert str(refused.value) == (
        "accelerator='tpu' takes strategies that were made for it alone, 'single_xla' or 'xla' or "
        f"'xla_debug' or 'xla_fsdp'; received {strategy!r}: change one of the two"
    )


@pytest.mark.usefixtures("four")
def test_strategies_that_know_nothing_of_xla_keep_the_processor() -> None:
    assert planned(strategy="ddp", devices=2).accelerator.name == "cpu"


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "xla", "devices": 2}, "drives all 4 XLA devices .*received devices=2: pass"),
        ({"accelerator": "tpu", "devices": 1}, "works? under SPMD only .*set CPU_NUM_DEVICES=1"),
        ({"strategy": "single_xla"}, "works? under SPMD only .*replicated ones abort"),
        ({"strategy": "xla", "devices": 5}, "asks for tpu device 4, but there are 4"),
        (
            {"strategy": "xla", "num_nodes": 2},
            "'xla' runs on one node, received num_nodes=2: pass num_nodes=1$",
        ),
        (
            {"strategy": "single_xla", "devices": 2},
            "uses one device, .*=1, or a strategy for several devices such as 'xla'$",
        ),
        ({"strategy": "xla", "precision": "16-true"}, "takes the precisions '32-true' or 'bf16"),
        ({"strategy": "xla", "accelerator": "cpu"}, "runs on 'tpu', received accelerator='cpu'"),
    ],
)
def test_xla_refuses_bad_trainer_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        planned(**options)


@pytest.mark.usefixtures("working")
def test_missing_pjrt_device_is_refused_before_processes_start() -> None:
    with pytest.raises(ConfigurationError, match=r"PJRT_DEVICE is not set .*CPU_NUM_DEVICES=4"):
        Lite(accelerator="tpu", devices=8)


@pytest.mark.parametrize("front_end", [Lite, Trainer])
def test_a_wrong_pair_is_refused_before_anything_is_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch, front_end: type[Lite | Trainer]
) -> None:
    install(torch="2.13.0", torch_xla="2.9.0")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ConfigurationError) as refused:
        front_end(accelerator="tpu", devices=1)
    assert str(refused.value) == (
        "accelerator='tpu' is not available on this machine: torch_xla 2.9.0 needs torch 2.9, and "
        f"2.13.0 is installed; in an environment of its own: {PAIR}; pass accelerator='auto' to "
        "take what there is"
    )
    with pytest.raises(ConfigurationError, match=r"tpu \(torch_xla 2\.9\.0 needs torch 2\.9, and"):
        front_end(strategy="xla")


def test_without_xla_auto_takes_the_cpu() -> None:
    assert planned().accelerator.name == "cpu"


# -- doctor, and the listing


def test_doctor_warns_of_missing_torch_xla() -> None:
    (check,) = stratagem_doctor()
    assert (check.name, check.status) == ("torch_xla", "warning")
    assert check.detail.endswith(PAIR)


def test_doctor_calls_a_wrong_pair_an_error(install: Install) -> None:
    install(torch_xla="2.9.0", torch="2.13.0")
    (check,) = stratagem_doctor()
    assert (check.name, check.status) == ("torch_xla 2.9.0", "error")
    assert "needs torch 2.9, and 2.13.0 is installed" in check.detail


def test_doctor_lists_torch_xla_and_its_devices(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(torch_xla="2.9.0", torch="2.9.1")
    versions, devices = stratagem_doctor()
    assert (versions.status, versions.detail) == ("ok", "with torch 2.9.1")
    assert (devices.status, devices.detail[:22]) == ("warning", "PJRT_DEVICE is not set")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert list(stratagem_doctor())[1].status == "ok"


def test_the_listing_says_why_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", "strategies", "--json"],
        env={**os.environ, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch_xla is not installed; in an environment of its own: pip install" in done.stdout


# -- checkpoints of the other torch


def test_ddp_goes_on_from_a_checkpoint_of_xla_fsdp_under_torch_2_9(tmp_path: Path) -> None:
    """Both files are of the same training; tests/save_first_epoch.py has made them."""
    here = Path(__file__).parent

    def losses(strategy: str, file: str) -> list[float]:
        arguments = (strategy, str(here / "data" / file), str(tmp_path))
        done = run_file(here / "go_on.py", *arguments, folder=tmp_path)
        found: list[float] = json.loads(done.stdout.partition("RESULT")[2])
        return found

    expected = losses("single_device", "ddp_torch_2_13.ckpt")
    for strategy in ("ddp", "single_device"):
        found = losses(strategy, "xla_fsdp_torch_2_9.ckpt")
        assert found == pytest.approx(expected, abs=2e-6)
