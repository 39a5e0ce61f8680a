"""What the visible GPUs can compute, asked of NVML: CUDA is not initialised by it."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from stratagem.errors import ConfigurationError
from stratagem.precision import Precision
from stratagem_cuda import probe

FLOAT8 = (8, 9)
"""The first compute capability with float8 arithmetic: Ada; Hopper is 9.0 (CUDA C++ Programming
Guide, "Compute Capabilities")."""


def visible_capabilities() -> dict[str, tuple[int, int]]:
    """Return the compute capability of each GPU that this process can use, by its name.

    Empty: the driver does not say, and only the GPU itself can be asked, on the rank that has it.
    """
    found = probe.driver()
    if isinstance(found, str):
        return {}
    import pynvml as nvml

    capabilities = {}
    nvml.nvmlInit()
    try:
        for gpu in probe.visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
                capabilities[gpu.name] = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    finally:
        nvml.nvmlShutdown()
    return capabilities


def check_visible_float8(precision: Precision) -> None:
    """Refuse float8 where none of the visible GPUs has it; before processes start.

    Raises:
        ConfigurationError: names the GPUs.
    """
    found = visible_capabilities()
    if found and max(found.values()) < FLOAT8:
        raise _refusal(precision, found)


def check_current_float8(precision: Precision) -> None:
    """Refuse float8 where this rank's GPU lacks it.

    Raises:
        ConfigurationError: names the GPU.
    """
    found = torch.cuda.get_device_capability()
    if found < FLOAT8:
        raise _refusal(precision, {torch.cuda.get_device_name(): found})


def _refusal(precision: Precision, found: dict[str, tuple[int, int]]) -> ConfigurationError:
    gpus = ", ".join(f"{name} has {major}.{minor}" for name, (major, minor) in found.items())
    return ConfigurationError(
        f"precision={precision.name!r} needs a GPU with float8 arithmetic, of compute capability "
        f"8.9 or more (Ada, Hopper, Blackwell): {gpus}. Pass precision='bf16-mixed'"
    )
