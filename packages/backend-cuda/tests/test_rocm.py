"""AMD's GPUs: from stated facts, from a played kernel, and which build of torch a machine needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem import Lite
from stratagem.discovery import Availability, TorchBuild
from stratagem.errors import ConfigurationError
from stratagem_cuda import accelerator, nvml, plugin, probe, rocm
from stratagem_cuda.accelerator import CUDAAccelerator
from stratagem_cuda.gpu import GPU
from stratagem_cuda.precision import compute_capability, objections
from stratagem_cuda.probe import NO_DRIVER, Driver, availability
from stratagem_cuda.rocm import architecture, gpus_of

MI300 = tuple(GPU(i, f"GPU-{i:016x}", "AMD gfx942", memory=192 * 2**30) for i in range(4))
H100 = Driver("580.65", (13, 0), (GPU(0, "GPU-aa", "NVIDIA H100"),))
ROCM = TorchBuild("2.13.0+rocm7.1", None, hip="7.1.25424")
CUDA = TorchBuild("2.13.0", "13.0")
CPU = TorchBuild("2.13.0+cpu", None)


def found(
    build: TorchBuild = ROCM,
    *,
    amd: tuple[GPU, ...] = MI300,
    nvidia: Driver | str = NO_DRIVER,
    environ: Mapping[str, str] | None = None,
) -> Availability:
    return availability(environ or {}, lambda: build, lambda: nvidia, lambda: list(amd))


def test_a_build_with_rocm_finds_amds_gpus_without_nvml() -> None:
    assert found() == Availability(4, "4 GPU(s): AMD gfx942", memory=192 * 2**30)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, 2),  # HIP's own comes first
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, 1),  # of those two
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000003"}, 1),
    ],
)
def test_rocms_variables_choose_gpus(environ: dict[str, str], count: int) -> None:
    seen = found(environ=environ)
    assert seen.count == count
    assert seen.reason.startswith(f"{count} of 4 GPUs by ")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES='-1' hides every GPU"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES='' hides every GPU"),
        (
            {"HIP_VISIBLE_DEVICES": "9"},
            "HIP_VISIBLE_DEVICES='9' names no GPU that is here: 0 (GPU-0000000000000000)",
        ),
    ],
)
def test_hidden_gpus_are_named_in_the_reason(environ: dict[str, str], reason: str) -> None:
    seen = found(environ=environ)
    assert seen.count == 0
    assert seen.reason.startswith(reason)


def test_the_wrong_build_of_torch_is_named_with_the_right_one() -> None:
    where = "(https://pytorch.org/get-started/locally)"
    assert found(CUDA).reason == (
        "torch 2.13.0 was built for CUDA 13.0, and this machine has AMD gfx942: install a build "
        f"for ROCm {where}"
    )
    assert found(ROCM, amd=(), nvidia=H100).reason == (
        "torch 2.13.0+rocm7.1 was built for ROCm 7.1.25424, and this machine has NVIDIA H100: "
        f"install a build for CUDA {where}"
    )
    assert found(CPU).reason == (
        "torch 2.13.0+cpu was built without ROCm, and this machine has AMD gfx942: install the "
        f"build for them {where}"
    )
    assert found(CPU, amd=()).reason == (
        f"torch 2.13.0+cpu was built without CUDA and ROCm: install the build for your GPU {where}"
    )
    assert found(CUDA, amd=()).reason == NO_DRIVER
    assert found(ROCM, amd=()).reason.startswith("there is no AMD GPU with a driver (amdgpu")


def test_gpus_of_two_vendors_are_chosen_by_the_build() -> None:
    assert found(CUDA, nvidia=H100).reason == "1 GPU(s): NVIDIA H100"
    assert found(ROCM, nvidia=H100).reason == "4 GPU(s): AMD gfx942"


# -- the kernel, played


def node(
    folder: Path, number: int, *, simd_count: int, version: int = 90402, memory: int = 2**30
) -> None:
    """Make a node, as /sys/class/kfd/kfd/topology/nodes has them."""
    place = folder / "nodes" / str(number)
    for bank, (heap, size) in enumerate(((1, memory), (4, 2**16))):
        (place / f"mem_banks/{bank}").mkdir(parents=True)
        text = f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n"
        (place / f"mem_banks/{bank}/properties").write_text(text)
    (place / "properties").write_text(
        f"cpu_cores_count 0\nsimd_count {simd_count}\ngfx_target_version {version}\n"
        f"unique_id {number + 160}\n"
    )


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    node(tmp_path, 0, simd_count=0)  # a processor
    node(tmp_path, 10, simd_count=304, memory=2**34)
    node(tmp_path, 2, simd_count=240, version=90010)
    node(tmp_path, 3, simd_count=304)
    (tmp_path / "nodes/3/properties").write_text("")  # not handed into this container
    (tmp_path / "kfd").touch()
    return tmp_path


def test_the_kernels_nodes_with_simd_units_are_gpus(kernel: Path) -> None:
    assert list(gpus_of(kernel / "nodes", kernel / "kfd")) == [
        GPU(0, "GPU-00000000000000a2", "AMD gfx90a", "", 2**30),
        GPU(1, "GPU-00000000000000aa", "AMD gfx942", "", 2**34),
    ]


def test_rocm_device_node_without_permission_is_named(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = list(gpus_of(kernel / "nodes", kernel / "nothing"))
    assert "a container needs it handed in" in missing[0].problem
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    closed = tuple(gpus_of(kernel / "nodes", kernel / "kfd"))
    assert closed[0].problem.endswith("join the group 'render'")
    assert "GPU 0 (AMD gfx90a) cannot be used" in found(amd=closed).reason


def test_rocm_without_kernel_nodes_finds_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocm, "NODES", str(tmp_path / "nothing"))
    assert rocm.find_gpus() == []


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (120001, "gfx1201")]
)
def test_architectures_have_the_names_of_amds_compilers(version: int, name: str) -> None:
    assert architecture(version) == name


# -- what a user asks for


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this machine have a build of torch, and GPUs of AMD or NVIDIA."""

    def play(build: TorchBuild, nvidia: Driver | str = NO_DRIVER) -> None:
        seen = availability({}, lambda: build, lambda: nvidia, lambda: list(MI300))
        monkeypatch.setattr(probe, "cuda_availability", lambda: seen)
        for module in (plugin, compute_capability, objections):
            monkeypatch.setattr(module, "torch_build", lambda: build)
        monkeypatch.setattr(rocm, "find_gpus", lambda: list(MI300))

    return play


def test_rocm_is_a_name_of_amds_gpus(machine: Callable[..., None]) -> None:
    machine(ROCM)
    for asked in ("rocm", "ROCm", "cuda", "gpu", "auto"):
        plan = Lite(accelerator=asked, devices=2).plan
        assert (plan.accelerator.name, plan.devices) == ("cuda", (0, 1))


def test_unavailable_gpu_error_has_the_requested_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "cuda_availability", lambda: found(CPU, amd=()))
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="rocm")
    assert str(caught.value).startswith(
        "accelerator='rocm' is not available on this machine: torch 2.13.0+cpu was built without "
        "CUDA and ROCm: install the build for your GPU"
    )


def test_rocm_is_refused_with_a_build_for_nvidia(machine: Callable[..., None]) -> None:
    machine(CUDA, H100)
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="rocm")
    assert str(caught.value) == (
        "accelerator='rocm' means AMD's GPUs, and torch 2.13.0 was built for CUDA 13.0: pass "
        "accelerator='cuda', or install a build of torch for ROCm"
    )
    assert Lite(accelerator="cuda").plan.accelerator.name == "cuda"


def test_float8_on_rocm_needs_a_gpu_with_float8(machine: Callable[..., None]) -> None:
    machine(ROCM)
    assert compute_capability.why_no_visible_float8("float8") == ""
    assert rocm.why_no_float8("float8", ["AMD gfx1201"]) == ""
    assert rocm.why_no_float8("float8", ["AMD gfx90a", "AMD gfx90a"]) == (
        "precision='float8' needs a GPU with float8 arithmetic (AMD's MI300, MI350 and RX 9000: "
        "gfx942, gfx950, gfx1200, gfx1201): here is AMD gfx90a. Pass precision='bf16-mixed'"
    )


def test_a_rank_asks_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    for name, refused in (("gfx942:sramecc+:xnack-", False), ("gfx1100", True)):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda it=properties: it)
        if not refused:
            compute_capability.check_current_float8("float8")
            continue
        with pytest.raises(ConfigurationError, match="here is gfx1100"):
            compute_capability.check_current_float8("float8")


def test_nvml_is_not_asked_about_amds_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "torch_build", lambda: ROCM)
    monkeypatch.setattr(nvml, "driver", lambda: pytest.fail("NVML is asked"))
    nvml.handle_of.cache_clear()
    assert nvml.stats(0) == {}
    assert nvml.other_processes(0) == []
    nvml.handle_of.cache_clear()


def test_transformer_engine_is_refused(machine: Callable[..., None]) -> None:
    machine(ROCM)
    plan: Any = SimpleNamespace(precision=SimpleNamespace(name="transformer-engine"))
    assert "has no kernels for AMD's GPUs" in objections.transformer_engine(plan)


# -- the class


@pytest.fixture
def on_rocm(monkeypatch: pytest.MonkeyPatch) -> CUDAAccelerator:
    monkeypatch.setattr(accelerator, "_IS_ROCM", True)
    monkeypatch.setattr(accelerator, "_SMI", "rocm-smi")
    monkeypatch.setattr(accelerator, "_BLOCKING", ("AMD_SERIALIZE_KERNEL", "3"))
    return CUDAAccelerator()


def test_errors_of_hip_are_explained(
    on_rocm: CUDAAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_rocm.is_out_of_memory(RuntimeError("HIP error: out of memory"))
    assert on_rocm.explain_lost_device(RuntimeError("shapes differ")) is None
    error = RuntimeError("HIP error: an illegal memory access was encountered")
    said = on_rocm.explain_lost_device(error)
    assert said is not None
    assert "run again with AMD_SERIALIZE_KERNEL=3 in the environment" in said
    monkeypatch.setenv("AMD_SERIALIZE_KERNEL", "3")
    said = on_rocm.explain_lost_device(error)
    assert said is not None
    assert "each call has waited for its kernel (AMD_SERIALIZE_KERNEL=3)" in said


def test_tf32_is_no_matter_of_amds_gpus(on_rocm: CUDAAccelerator) -> None:
    assert on_rocm.hints(torch.device("cuda", 0), torch.float32) == ()


def test_a_gpu_that_cannot_be_used_names_rocms_tool(on_rocm: CUDAAccelerator) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigurationError, match="`rocm-smi` shows"):
        on_rocm.setup_device(torch.device("cuda", 0))
