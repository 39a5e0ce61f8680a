"""CUDAAccelerator, as far as it needs no GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem_cuda import nvml
from stratagem_cuda.accelerator import CUDAAccelerator


def test_devices_have_an_index_and_are_not_the_host() -> None:
    accelerator = CUDAAccelerator()
    assert accelerator.device(1) == torch.device("cuda", 1)
    assert not accelerator.is_host
    assert accelerator.name == "cuda"
    # What the ranks tell each other beside tensors of the GPUs never waits for a GPU.
    assert accelerator.process_group_backend == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("variable", "value", "index"),
    [
        ("CUDA_VISIBLE_DEVICES", "3", 0),
        ("CUDA_VISIBLE_DEVICES", "GPU-aa", 0),
        ("ROCR_VISIBLE_DEVICES", "0", 0),
        ("CUDA_VISIBLE_DEVICES", "4,5", 1),
        ("CUDA_VISIBLE_DEVICES", "", 1),
    ],
)
def test_the_only_gpu_that_a_process_sees_is_its_device(
    variable: str, value: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with SLURM's --gpus-per-task=1, for the task with the local rank 1."""
    monkeypatch.setenv(variable, value)
    assert CUDAAccelerator().device(1) == torch.device("cuda", index)


def test_kernels_are_chosen_as_asked_until_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.benchmark
    restore = CUDAAccelerator().configure_kernels(benchmark=True, deterministic=False)
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    restore()
    assert torch.backends.cudnn.benchmark == before
    restore = CUDAAccelerator().configure_kernels(benchmark=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    restore()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    CUDAAccelerator().configure_kernels(benchmark=False, deterministic=True)()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU; `nox -s tests` runs it where there is none"
)
def test_availability_without_a_gpu_has_a_reason() -> None:
    found = CUDAAccelerator().availability()
    assert found.count == 0
    assert found.reason.startswith(f"torch {torch.__version__} finds")


# -- errors of CUDA, played


ASSERT = torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors")


def test_failed_kernel_advises_cuda_launch_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    explain = CUDAAccelerator().explain_lost_device
    for error in (ASSERT, RuntimeError(str(ASSERT))):  # older builds of torch raise the latter
        advice = str(explain(error))
        assert "run again with CUDA_LAUNCH_BLOCKING=1 in the environment" in advice
        assert "an index, label or token out of range" in advice
        assert advice.endswith("This process cannot use the GPU any more")
    illegal = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert "out of range" not in str(explain(illegal))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "so that the line is right. An assert" in str(explain(ASSERT))


def test_unsupported_gpu_error_names_the_torch_build() -> None:
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the")
    assert "this build of torch has no kernels for this GPU" in str(
        CUDAAccelerator().explain_lost_device(error)
    )


def test_an_error_of_the_users_is_not_cudas() -> None:
    assert CUDAAccelerator().explain_lost_device(RuntimeError("shapes differ")) is None
    assert not CUDAAccelerator().is_out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_may_be_full_for_torch_for_cuda_and_for_its_libraries(error: RuntimeError) -> None:
    assert CUDAAccelerator().is_out_of_memory(error)


def test_a_gpu_that_cannot_be_had_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy")

    monkeypatch.setattr(torch.accelerator, "set_device_index", busy)
    expected = r"GPU cuda:1 cannot be used by this process: CUDA error: CUDA-capable device\(s\) is"
    with pytest.raises(ConfigurationError, match=expected):
        CUDAAccelerator().setup_device(torch.device("cuda", 1))


# -- NVML, played


@pytest.fixture
def _sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise pynvml.NVMLError_NotSupported

    running = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=10),
        SimpleNamespace(pid=1, usedGpuMemory=20),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=30),  # of another pid namespace
        SimpleNamespace(pid=1, usedGpuMemory=None),
    ]
    answers: dict[str, Any] = {
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=41),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetPowerUsage": refuses,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: running,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(nvml, "handle_of", lambda index: f"handle {index}")


@pytest.mark.usefixtures("_sensors")
def test_nvml_stats_omit_missing_sensors() -> None:
    assert nvml.stats(0) == {
        "utilization_percent": 97.0,
        "memory_utilization_percent": 41.0,
        "temperature_celsius": 61.0,
    }


@pytest.mark.usefixtures("_sensors")
def test_other_processes_have_pid_name_and_size() -> None:
    ((who, size),) = nvml.other_processes(0)
    assert who.startswith("process 1 (")
    assert size == 20


@pytest.mark.usefixtures("_sensors")
def test_the_memory_of_a_gpu_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"allocated_bytes.all.current": 30, "reserved_bytes.all.current": 40}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: counted)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15, 100))
    device = torch.device("cuda", 0)
    memory = CUDAAccelerator().device_memory(device)
    assert (memory.total, memory.allocated, memory.reserved) == (100, 30, 40)
    assert sum(size for _, size in memory.others) == 100 - 15 - 40
    assert CUDAAccelerator().device_stats(device)["alloc_retries"] == 2


def test_nvml_without_a_driver_returns_no_stats() -> None:
    nvml.handle_of.cache_clear()
    try:
        if nvml.handle_of(0) is None:
            assert nvml.stats(0) == {}
            assert nvml.other_processes(0) == []
    finally:
        nvml.handle_of.cache_clear()
