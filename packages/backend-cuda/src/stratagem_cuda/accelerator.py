"""CUDAAccelerator: NVIDIA GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from stratagem.accelerators import DeviceAccelerator

TF32 = (8, 0)
"""The first compute capability with TF32: Ampere (CUDA C++ Programming Guide)."""


class CUDAAccelerator(DeviceAccelerator):
    """NVIDIA GPUs of this node.

    Example:
        >>> from stratagem_cuda.accelerator import CUDAAccelerator
        >>> CUDAAccelerator().device(1)
        device(type='cuda', index=1)
    """

    name = "cuda"
    process_group_backend = "nccl"
    sync_batchnorm_kernels = True
    data_parallel_kernels = True

    def hints(self, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Say that TF32 is off, where the GPU has it and nothing was said of it.

        torch leaves it off in matrix products ("highest"), and on in cuDNN's convolutions. What is
        wanted is the user's to say, by torch's own setting, which this does not touch.
        """
        is_set = torch.backends.cuda.matmul.fp32_precision != "none"
        if is_set or dtype is not torch.float32 or torch.cuda.get_device_capability(device) < TF32:
            return ()
        name = torch.cuda.get_device_name(device)
        return (
            f"matrix products in float32 do not use the TF32 cores of {name}: "
            "torch.set_float32_matmul_precision('high') makes large ones several times as fast, "
            "with 10 bits of mantissa in place of 23; 'highest' keeps them exact, and this quiet",
        )

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        """Set cuDNN's choice of convolutions, and cuBLAS's workspace for determinism."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = benchmark
        if deterministic:
            # cuBLAS is deterministic only with a workspace of fixed size, and reads it once.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

        def restore() -> None:
            torch.backends.cudnn.benchmark = before

        return restore
