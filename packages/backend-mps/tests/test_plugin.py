"""The plugin of stratagem-backend-mps: light, and it refuses the plans that Metal cannot run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Lite, Trainer
from stratagem.discovery import Availability
from stratagem.errors import ConfigurationError
from stratagem.precision import TruePrecision
from stratagem.strategies import DDPStrategy
from stratagem_mps import plugin, probe
from stratagem_mps.accelerator import MPSAccelerator


def test_the_distribution_declares_its_plugin_module() -> None:
    declared = distribution("stratagem-backend-mps").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == {"mps": "stratagem_mps.plugin"}


@pytest.mark.parametrize("code", ["import stratagem_mps.plugin", "import stratagem_mps.probe"])
def test_the_plugin_and_its_probe_do_not_import_torch(code: str) -> None:
    code = f"import sys; {code} as m; getattr(m, 'mps_availability', int)()"
    code += "; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plugin_registers_the_names_of_its_readme() -> None:
    (spec,) = plugin.stratagem_components()
    assert (spec.kind, spec.name, spec.aliases) == ("accelerator", "mps", ("gpu",))
    assert spec.load() is MPSAccelerator
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "| accelerator `mps`, alias `gpu` |" in readme
    assert "Never run on hardware" in readme
    assert "Never run on hardware" in spec.summary


# -- on a Mac that is played


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let this machine be a Mac with Metal."""

    def play(major: int, minor: int) -> None:
        here = probe.Mac("darwin", "arm64", (major, minor), 2**34)
        monkeypatch.setattr(probe, "this_mac", lambda: here)
        monkeypatch.setattr(probe, "has_metal", lambda: True)
        monkeypatch.setattr(plugin, "macos_version", lambda: (major, minor))
        found = Availability(1, "a played Mac")
        monkeypatch.setattr(MPSAccelerator, "availability", lambda self: found)

    play(15, 1)
    return play


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Lite(**{"accelerator": "mps", **options})
    return str(caught.value)


def test_a_mac_trains_on_its_gpu_by_default(mac: object) -> None:
    for asked in ("auto", "mps", "gpu"):
        plan = Trainer(accelerator=asked, logger=False).plan
        assert (plan.accelerator.name, plan.devices) == ("mps", (0,))
        assert plan.strategy.name == "single_device"


@pytest.mark.parametrize("precision", ["64-true", 64, TruePrecision("64-true")])
@pytest.mark.parametrize("accelerator", ["mps", MPSAccelerator()])
def test_float64_is_refused_by_name(mac: object, accelerator: Any, precision: Any) -> None:
    assert refusal(accelerator=accelerator, precision=precision) == (
        "precision='64-true': Metal has no float64, so accelerator='mps' cannot hold such "
        "tensors: pass precision='32-true', or accelerator='cpu'"
    )


def test_more_than_the_one_device_is_refused(mac: object) -> None:
    for asked in (2, [1], "0,1"):
        assert refusal(devices=asked) == (
            f"devices={asked!r} asks for mps device 1, but there are 1 here (Apple silicon's GPU, "
            "macOS 15.1), counted from 0: name those, or pass devices=-1 for all"
        )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_spawn", DDPStrategy()])
def test_several_processes_are_refused(mac: object, strategy: Any) -> None:
    said = refusal(strategy=strategy, devices=1)
    assert said.startswith("accelerator='mps' is one device, and torch.distributed has no backend")
    assert said.endswith("strategy='single_device', or accelerator='cpu' for several processes")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_needs_macos_14(mac: Callable[[int, int], None], precision: str) -> None:
    mac(13, 6)
    assert refusal(precision=precision) == (
        f"precision={precision!r}: accelerator='mps' has bfloat16 from macOS 14 on, and this is "
        "macOS 13.6: pass precision='32-true', or update macOS"
    )
    mac(14, 0)
    assert plugin.why_impossible(Trainer(accelerator="mps", logger=False).plan, (14, 0)) == ""


def test_other_accelerators_may_do_all_that(mac: object) -> None:
    assert Lite(accelerator="cpu", precision="64-true").plan.precision.name == "64-true"


def test_without_a_mac_the_accelerator_says_so() -> None:
    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    assert (
        "accelerator='mps' is not available on this machine: Metal needs macOS, and this is "
        f"{sys.platform}; pass accelerator='auto'"
    ) in refusal()


# -- the class, without a device


@pytest.mark.parametrize(
    ("text", "full"),
    [
        (
            "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 MiB, max "
            "allowed: 9.07 GiB). Tried to allocate 2.00 GiB on private pool.",
            True,
        ),
        ("Invalid buffer size: 20.00 GiB", True),
        ("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", True),
        ("shapes differ", False),
    ],
)
def test_full_memory_is_known(text: str, full: bool) -> None:
    accelerator = MPSAccelerator()
    assert accelerator.is_out_of_memory(RuntimeError(text)) is full
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO" in accelerator.memory_advice


def test_mps_has_no_bfloat16_autocast_before_macos_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem_mps.accelerator.macos_version", lambda: (13, 6))
    assert MPSAccelerator().autocast(torch.bfloat16) is None
    assert MPSAccelerator().autocast(torch.float16) is not None


def test_batches_are_not_pinned() -> None:
    assert not MPSAccelerator().pins_memory
