"""What the probes find: from facts that are played, and on this machine, which has neither SDK."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stratagem_hpu_ipu import hpu_probe, ipu_probe


def _gaudi(folder: Path, *drivers: str) -> Path:
    """Make a /sys/class/accel with a device of each driver."""
    for number, driver in enumerate(drivers):
        target = folder / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        device = folder / "accel" / f"accel{number}" / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(target)
    return folder / "accel"


def _nodes(folder: Path, *names: str) -> Path:
    for name in names:
        node = folder / "dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
    (folder / "dev").mkdir(exist_ok=True)
    return folder / "dev"


def test_gaudi_devices_need_a_driver_entry_and_a_node(tmp_path: Path) -> None:
    listed = _gaudi(tmp_path, "intel_vpu", "habanalabs", "habanalabs", "habanalabs")
    nodes = _nodes(tmp_path, "accel/accel0", "accel/accel1", "accel/accel3")
    assert hpu_probe.count_devices(listed, nodes) == 2


def test_gaudi_devices_of_an_older_kernel_are_found(tmp_path: Path) -> None:
    nodes = _nodes(tmp_path, "hl0", "hl1", "hl_controlD0")
    assert hpu_probe.count_devices(tmp_path / "none", nodes) == 2


@pytest.mark.parametrize(
    ("environ", "sdk", "devices", "count", "reason"),
    [
        ({}, False, 8, 0, "the Gaudi SDK is not installed"),
        ({}, True, 0, 0, "there is no Gaudi device: the driver habanalabs has made none"),
        ({}, True, 8, 8, "8 Gaudi device(s)"),
        ({"HABANA_VISIBLE_MODULES": ""}, True, 8, 0, "HABANA_VISIBLE_MODULES='' names no Gaudi"),
        ({"HABANA_VISIBLE_MODULES": "2,3"}, True, 8, 2, "2 of 8 Gaudi devices by HABANA_VISIBLE"),
    ],
)
def test_gaudis_availability_says_why(
    environ: dict[str, str], sdk: bool, devices: int, count: int, reason: str
) -> None:
    found = hpu_probe.availability(environ, sdk=sdk, devices=devices)
    assert found.count == count
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("environ", "sdk", "cards", "configs", "count", "reason"),
    [
        ({}, False, 2, [], 0, "the Poplar SDK is not enabled (no package poptorch;"),
        ({}, True, 0, [], 0, "there is no IPU: no /dev/ipu0, no partition of a Pod"),
        ({}, True, 4, [], 4, "4 IPU(s) in this machine"),
        ({}, True, 0, ["/etc/a.conf"], 1, "a partition of a Pod (/etc/a.conf)"),
        ({"IPUOF_VIPU_API_PARTITION_ID": "p"}, True, 0, [], 1, "a partition of a Pod (IPUOF_VIPU"),
        ({"POPTORCH_IPU_MODEL": "1"}, True, 0, [], 1, "emulated on the CPU"),
        ({"POPTORCH_IPU_MODEL": "0"}, True, 0, [], 0, "there is no IPU"),
    ],
)
def test_ipus_availability_says_why(
    environ: dict[str, str], sdk: bool, cards: int, configs: list[str], count: int, reason: str
) -> None:
    found = ipu_probe.availability(environ, sdk=sdk, cards=cards, configs=configs)
    assert found.count == count
    assert found.reason.startswith(reason)


def test_a_package_of_the_vendor_without_its_part_for_torch_is_no_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "habana_frameworks").mkdir()
    (tmp_path / "habana_frameworks" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not hpu_probe.has_sdk()
    (tmp_path / "habana_frameworks" / "torch").mkdir()
    assert hpu_probe.has_sdk()


@pytest.mark.parametrize("command", ["strategies", "doctor"])
def test_the_command_line_lists_them_with_the_reason_and_without_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from stratagem.cli import main\n"
        f"sys.argv = ['stratagem', {command!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch is imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "the Gaudi SDK is not installed" in text
    assert "the Poplar SDK is not enabled" in text
