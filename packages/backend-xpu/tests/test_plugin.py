"""The plugin of stratagem-backend-xpu: light, and "gpu" means the GPU that is present."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Lite, Trainer
from stratagem.discovery import AcceleratorSpec, Availability
from stratagem.errors import ConfigurationError
from stratagem_xpu import plugin, probe
from stratagem_xpu.accelerator import XPUAccelerator


def test_the_distribution_declares_its_plugin_module() -> None:
    declared = distribution("stratagem-backend-xpu").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == {"xpu": "stratagem_xpu.plugin"}


@pytest.mark.parametrize("code", ["import stratagem_xpu.plugin", "import stratagem_xpu.probe"])
def test_the_plugin_and_its_probe_do_not_import_torch(code: str) -> None:
    code = f"import sys; {code} as m; getattr(m, 'xpu_availability', int)()"
    code += "; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plugin_registers_the_names_of_its_readme() -> None:
    (spec,) = plugin.stratagem_components()
    assert (spec.kind, spec.name, spec.aliases) == ("accelerator", "xpu", ("gpu",))
    assert spec.load() is XPUAccelerator
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "| accelerator `xpu`, alias `gpu` |" in readme
    assert "Never run on hardware" in readme
    assert "Never run on hardware" in spec.summary


# -- on a machine that is played


def play(monkeypatch: pytest.MonkeyPatch, **counts: int) -> None:
    """Let this machine have GPUs: by the module of each probe, how many."""
    for name in ("cuda", "mps", "xpu"):
        count = counts.get(name, 0)
        found = Availability(count, f"{count} played")
        function = f"stratagem_{name}.probe.{name}_availability"
        monkeypatch.setattr(function, lambda found=found: found)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_gpu_is_the_gpu_that_is_present(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, **{kind: 2})
    for asked in ("gpu", "GPU", "auto", kind):
        plan = Trainer(accelerator=asked, devices=1, logger=False).plan
        assert (plan.accelerator.name, plan.devices) == (kind, (0,))
    assert Lite(accelerator="gpu").plan.world_size == 2


def test_two_kinds_of_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, cuda=1, xpu=4)
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="gpu")
    assert str(caught.value) == (
        "accelerator='gpu' means one of several that are on this machine: name it: 'cuda' "
        "(1 played); 'xpu' (4 played)"
    )
    assert Lite(accelerator="auto", devices=1).plan.accelerator.name == "cuda"
    assert Lite(accelerator="xpu", devices=1).plan.accelerator.name == "xpu"


def test_without_a_gpu_each_kind_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="gpu")
    assert str(caught.value) == (
        "accelerator='gpu' is not available on this machine: 'cuda' (0 played); 'mps' (0 played); "
        "'xpu' (0 played); pass accelerator='auto' to take what there is"
    )
    assert Lite(accelerator="auto").plan.accelerator.name == "cpu"


# -- the class, without a device


def test_the_ranks_communicate_over_xccl_and_gloo() -> None:
    assert XPUAccelerator.process_group_backend == "cpu:gloo,xpu:xccl"
    # torch's own name for it.
    assert torch.distributed.Backend.default_device_backend_map["xpu"] == "xccl"


def test_unusable_intel_gpu_raises_with_advice() -> None:
    if torch.xpu.is_available():
        pytest.skip("there is an Intel GPU")
    with pytest.raises(ConfigurationError, match=r"the GPU xpu:0 cannot be used by this process:"):
        XPUAccelerator().setup_device(torch.device("xpu", 0))
    with pytest.raises(ConfigurationError, match="expected a device xpu, received cpu"):
        XPUAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("XPU out of memory."), True),
        (RuntimeError("level_zero backend failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_full_memory_is_known(error: Exception, full: bool) -> None:
    assert XPUAccelerator().is_out_of_memory(error) is full


def test_a_device_that_was_reset_is_explained() -> None:
    error: Any = RuntimeError("level_zero backend failed with error: UR_RESULT_ERROR_DEVICE_LOST")
    said = XPUAccelerator().explain_lost_device(error)
    assert said is not None
    assert "`dmesg` says why" in said
    assert XPUAccelerator().explain_lost_device(RuntimeError("shapes differ")) is None


def test_xpu_spec_names_the_probe() -> None:
    (spec,) = plugin.stratagem_components()
    assert isinstance(spec, AcceleratorSpec)
    assert spec.probe == f"{probe.__name__}:{probe.xpu_availability.__name__}"
