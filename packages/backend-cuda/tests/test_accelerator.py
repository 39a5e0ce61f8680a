"""CUDAAccelerator, as far as it needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from stratagem_cuda.accelerator import CUDAAccelerator


def test_devices_have_an_index_and_are_not_the_host() -> None:
    accelerator = CUDAAccelerator()
    assert accelerator.device(1) == torch.device("cuda", 1)
    assert not accelerator.is_host
    assert accelerator.name == "cuda"
    assert accelerator.process_group_backend == "nccl"


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
    CUDAAccelerator().configure_kernels(benchmark=False, deterministic=True)()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU; `nox -s tests` runs it where there is none"
)
def test_without_a_gpu_there_are_no_devices_and_the_reason() -> None:
    found = CUDAAccelerator().availability()
    assert found.count == 0
    assert found.reason.startswith(f"torch {torch.__version__} finds")
