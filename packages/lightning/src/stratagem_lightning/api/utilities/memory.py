"""Memory: errors for the want of it, and what is freed."""

from __future__ import annotations

import gc
from typing import Any

import torch

from stratagem.data import map_tensors


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Return a nested collection with its tensors detached.

    Args:
        in_dict: the collection.
        to_cpu: move them to the CPU as well.
    """
    detached = map_tensors(torch.Tensor.detach, in_dict)
    return map_tensors(torch.Tensor.cpu, detached) if to_cpu else detached


def is_oom_error(exception: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    found = (is_cuda_out_of_memory, is_cudnn_snafu, is_out_of_cpu_memory)
    return any(says(exception) for says in found)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Whether a GPU has no memory left."""
    return isinstance(exception, RuntimeError) and "out of memory" in str(exception)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Whether cuDNN failed as it does for the want of memory."""
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."
    return isinstance(exception, RuntimeError) and text in str(exception)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether the host has no memory left."""
    text = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(exception, RuntimeError) and text in str(exception)


def garbage_collection_cuda() -> None:
    """Free unreferenced objects on the host and the GPUs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def num_cuda_devices() -> int:
    """Return how many CUDA devices torch can use."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Whether torch can use a CUDA device."""
    return torch.cuda.device_count() > 0
