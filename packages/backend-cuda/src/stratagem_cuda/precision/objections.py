"""Why a precision cannot be used here: found without torch, for a request and for `bind`."""

from __future__ import annotations

from typing import Any

from stratagem.discovery import torch_build
from stratagem_cuda.precision.compute_capability import why_no_visible_float8, why_no_visible_mxfp8
from stratagem_cuda.precision.requirement import (
    BITSANDBYTES,
    TORCHAO,
    TORCHAO_MX,
    TRANSFORMER_ENGINE,
)


def bitsandbytes(plan: Any) -> str:
    """Return why a precision of bitsandbytes cannot be used in a plan, or ""."""
    return BITSANDBYTES.why_not(plan.precision.name)


def float8(plan: Any) -> str:
    """Return why float8 by torchao cannot be used in a plan, or ""."""
    accelerator = plan.accelerator
    # An accelerator object with another name is checked in the bind() of the precision.
    has_kernels = accelerator.name == "cuda" or accelerator.spec is None
    return why_no_float8(plan.precision.name, accelerator.name, has_kernels=has_kernels)


def mxfp8(plan: Any) -> str:
    """Return why MXFP8 by torchao cannot be used in a plan, or ""."""
    accelerator = plan.accelerator
    # An accelerator object with another name is checked in the bind() of the precision.
    has_kernels = accelerator.name == "cuda" or accelerator.spec is None
    return why_no_mxfp8(plan.precision.name, accelerator.name, has_kernels=has_kernels)


def transformer_engine(plan: Any) -> str:
    """Return why a precision of Transformer Engine cannot be used in a plan, or ""."""
    name = plan.precision.name
    build = torch_build()
    if build is not None and build.hip is not None:
        return (
            f"precision={name!r}: NVIDIA's Transformer Engine has no kernels for AMD's GPUs: pass "
            "precision='bf16-mixed'"
        )
    return TRANSFORMER_ENGINE.why_not(name) or why_no_visible_float8(name)


def why_no_float8(precision: str, accelerator: str, *, has_kernels: bool) -> str:
    """Return why torchao has no float8 kernels here, or "".

    Args:
        precision, accelerator: the names of the components.
        has_kernels: whether the accelerator is an NVIDIA GPU.
    """
    if why := TORCHAO.why_not(precision):
        return why
    if not has_kernels:
        return (
            f"precision={precision!r}: the accelerator {accelerator!r} has no float8 kernels: pass "
            "precision='bf16-mixed', or plugins=Float8Precision(emulate=True) to try the rounding, "
            "slowly"
        )
    return why_no_visible_float8(precision)


def why_no_mxfp8(precision: str, accelerator: str, *, has_kernels: bool) -> str:
    """Return why torchao has no MXFP8 kernels here, or "".

    Args:
        precision, accelerator: the names of the components.
        has_kernels: whether the accelerator is an NVIDIA GPU.
    """
    if why := TORCHAO_MX.why_not(precision):
        return why
    if not has_kernels:
        return (
            f"precision={precision!r}: the accelerator {accelerator!r} has no MXFP8 kernels: pass "
            "precision='bf16-mixed', or plugins=MXFP8Precision(emulate=True) to try the rounding, "
            "slowly"
        )
    return why_no_visible_mxfp8(precision)
