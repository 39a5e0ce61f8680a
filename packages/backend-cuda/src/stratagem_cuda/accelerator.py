"""CUDAAccelerator: NVIDIA GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from stratagem.accelerators import DeviceAccelerator


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
