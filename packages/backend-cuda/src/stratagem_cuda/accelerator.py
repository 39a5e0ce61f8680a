"""CUDAAccelerator: GPUs of NVIDIA, and of AMD with a build of torch for ROCm."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.accelerators import DeviceAccelerator, DeviceMemory
from stratagem.errors import ConfigurationError
from stratagem_cuda import nvml
from stratagem_cuda.gpu import shows_one_gpu

_FULL = (
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED", "miopenStatusAllocFailed"),
)
"""How CUDA, ROCm and their libraries say that memory is full where torch's allocator was not
asked."""
_IS_ROCM = torch.version.hip is not None
_SMI = "rocm-smi" if _IS_ROCM else "nvidia-smi"
_BLOCKING = ("AMD_SERIALIZE_KERNEL", "3") if _IS_ROCM else ("CUDA_LAUNCH_BLOCKING", "1")
"""The variable, and its value, with which each call waits for its kernel."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

TF32 = (8, 0)
"""The first compute capability with TF32: Ampere (CUDA C++ Programming Guide)."""


class CUDAAccelerator(DeviceAccelerator):
    """GPUs of this node, of NVIDIA or of AMD: torch calls both "cuda", and rccl "nccl".

    Example:
        >>> from stratagem_cuda.accelerator import CUDAAccelerator
        >>> CUDAAccelerator().device(1)
        device(type='cuda', index=1)
    """

    name = "cuda"
    # Weights-only-safe data of the ranks goes over gloo, so that it never waits for a GPU.
    process_group_backend = "cpu:gloo,cuda:nccl"
    sync_batchnorm_kernels = True
    data_parallel_kernels = True

    def device(self, index: int) -> torch.device:
        """Return the GPU with this index on the node, or the only one that this process may see.

        The cluster may show each process a GPU of its own, as SLURM does with `--gpus-per-task=1`.
        Each process then calls its GPU 0.
        """
        return super().device(0 if shows_one_gpu(os.environ) else index)

    def setup_device(self, device: torch.device) -> None:
        """Set the current device and reserve it; see `DeviceAccelerator.setup_device`.

        Raises:
            ConfigurationError: the device has another type, or is not available, for example
                because another process uses it in exclusive mode.
        """
        try:
            super().setup_device(device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter: torch without CUDA
            cause = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"the GPU {device} cannot be used by this process: {cause}. `{_SMI}` shows "
                "which processes are on it, and `stratagem doctor` which GPUs this one can see"
            ) from error

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the memory figures of torch and NVML's statistics of the GPU.

        `allocated_bytes`, `reserved_bytes` and their peaks, `alloc_retries` (how often the
        allocator has returned memory to find room), then those of `stratagem_cuda.nvml.stats`.
        """
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        index = device.index or 0
        return {**super().device_stats(device), "alloc_retries": retries, **nvml.stats(index)}

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error of torch, CUDA or a CUDA library reports a full GPU memory."""
        return super().is_out_of_memory(error) or any(text in str(error) for text in _FULL)

    def device_memory(self, device: torch.device) -> DeviceMemory:
        """Return who holds the GPU's memory, with other processes by their number and name."""
        own = super().device_memory(device)
        free, total = torch.cuda.mem_get_info(device)
        others = nvml.other_processes(device.index or 0)
        unknown = total - free - own.reserved - sum(size for _, size in others)
        of = "ROCm" if _IS_ROCM else "CUDA"
        others.append((f"{of} itself, and what is not known", max(0, unknown)))
        return DeviceMemory(total, own.allocated, own.peak, own.reserved, tuple(others))

    def explain_lost_device(self, error: BaseException) -> str | None:
        """Return advice on finding a failed kernel's line, or None if CUDA has not failed."""
        text = str(error)
        is_lost = "CUDA error" in text or "HIP error" in text
        if not is_lost and not isinstance(error, torch.AcceleratorError):
            return None
        if "no kernel image is available" in text:
            return (
                "this build of torch has no kernels for this GPU: install one that was built for "
                "it (torch.cuda.get_arch_list() says for which ones this was)"
            )
        variable, value = _BLOCKING
        if os.environ.get(variable) == value:
            how = f"{variable}={value}"
            line = f"each call has waited for its kernel ({how}), so that the line is right"
        else:
            line = (
                "kernels run after the calls that started them, so that an earlier line may be the "
                f"cause: run again with {variable}={value} in the environment, and the line is "
                "right"
            )
        if "device-side assert" in text:
            line += ". An assert in a kernel is most often an index, label or token out of range"
        return f"{line}. This process cannot use the GPU any more"

    def hints(self, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Hint at TF32 if the GPU has it and the user has neither enabled nor disabled it.

        torch leaves it off in matrix products ("highest"), and on in cuDNN's convolutions. What is
        wanted is the user's to say, by torch's own setting, which this does not touch.
        """
        if _IS_ROCM:
            return ()
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
        sets_workspace = deterministic and _WORKSPACE not in os.environ
        if sets_workspace:
            # cuBLAS is deterministic only with a workspace of fixed size, and reads it once.
            os.environ[_WORKSPACE] = ":4096:8"

        def restore() -> None:
            torch.backends.cudnn.benchmark = before
            if sets_workspace:
                os.environ.pop(_WORKSPACE, None)

        return restore
