"""What the visible GPUs can compute, asked of NVML: CUDA is not initialised by it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from stratagem.discovery import torch_build
from stratagem.errors import ConfigurationError
from stratagem_cuda import probe, rocm
from stratagem_cuda.gpu import visible_gpus

FLOAT8 = (8, 9)
"""The first compute capability with float8 arithmetic: Ada; Hopper is 9.0 (CUDA C++ Programming
Guide, "Compute Capabilities")."""

MXFP8 = 10
"""The major compute capability that torchao's MXFP8 kernels are for: Blackwell of data centers."""


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
        for gpu in visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
                capabilities[gpu.name] = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    finally:
        nvml.nvmlShutdown()
    return capabilities


def why_no_visible_float8(precision: str) -> str:
    """Return why no visible GPU computes in float8, with the GPUs' names, or ""."""
    if _has_rocm():
        return rocm.why_no_float8(precision, [gpu.name for gpu in rocm.find_gpus()])
    found = visible_capabilities()
    return _refusal(precision, found) if found and max(found.values()) < FLOAT8 else ""


def check_current_float8(precision: str) -> None:
    """Raise if a precision needs float8 and the GPU of this rank lacks it.

    Raises:
        ConfigurationError: names the GPU.
    """
    import torch  # here, since a request is resolved without it

    if torch.version.hip is not None:
        properties: Any = torch.cuda.get_device_properties()
        if why := rocm.why_no_float8(precision, [properties.gcnArchName.partition(":")[0]]):
            raise ConfigurationError(why)
        return
    found = torch.cuda.get_device_capability()
    if found < FLOAT8:
        raise ConfigurationError(_refusal(precision, {torch.cuda.get_device_name(): found}))


def why_no_visible_mxfp8(precision: str) -> str:
    """Return why no visible GPU multiplies in MXFP8, with the GPUs' names, or ""."""
    if _has_rocm():
        return _refusal_of_mxfp8(precision, "this is a build of torch for ROCm")
    found = visible_capabilities()
    if not found or any(major == MXFP8 for major, _ in found.values()):
        return ""
    return _refusal_of_mxfp8(precision, _listed(found))


def check_current_mxfp8(precision: str) -> None:
    """Raise if a precision needs MXFP8 and the GPU of this rank lacks it.

    Raises:
        ConfigurationError: names the GPU.
    """
    import torch  # here, since a request is resolved without it

    found = torch.cuda.get_device_capability()
    if torch.version.hip is not None or found[0] != MXFP8:
        raise ConfigurationError(
            _refusal_of_mxfp8(precision, _listed({torch.cuda.get_device_name(): found}))
        )


def _has_rocm() -> bool:
    build = torch_build()
    return build is not None and build.hip is not None


def _listed(found: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} has {major}.{minor}" for name, (major, minor) in found.items())


def _refusal(precision: str, found: dict[str, tuple[int, int]]) -> str:
    return (
        f"precision={precision!r} needs a GPU with float8 arithmetic, of compute capability "
        f"8.9 or more (Ada, Hopper, Blackwell): {_listed(found)}. Pass precision='bf16-mixed'"
    )


def _refusal_of_mxfp8(precision: str, found: str) -> str:
    return (
        f"precision={precision!r} needs a GPU of compute capability 10.0 or 10.3 (B200, GB200, "
        f"B300), for which torchao has kernels: {found}. Pass precision='float8' on an Ada or "
        "Hopper GPU, 'bf16-mixed' on others, or plugins=MXFP8Precision(emulate=True)"
    )
