"""Why a precision cannot be used here: found without torch, for a request and for `bind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratagem.discovery import torch_build
from stratagem_cuda.precision.compute_capability import why_no_visible_float8, why_no_visible_mxfp8
from stratagem_cuda.precision.requirement import (
    BITSANDBYTES,
    TORCHAO,
    TORCHAO_MX,
    TRANSFORMER_ENGINE,
    Requirement,
)


def bitsandbytes(plan: Any) -> str:
    """Return why a precision of bitsandbytes cannot be used in a plan, or ""."""
    return BITSANDBYTES.why_not(plan.precision.name)


def float8(plan: Any) -> str:
    """Return why float8 by torchao cannot be used in a plan, or ""."""
    return _in_plan(FLOAT8_KERNELS, plan)


def mxfp8(plan: Any) -> str:
    """Return why MXFP8 by torchao cannot be used in a plan, or ""."""
    return _in_plan(MXFP8_KERNELS, plan)


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


@dataclass(frozen=True)
class Kernels:
    """The kernels of torchao for a format of numbers.

    Attributes:
        format: the name of the format, for messages.
        precision: the name of the class that uses them.
        requirement: the versions of torchao that have them.
        why_no_visible: returns why no visible GPU has them, for the name of a precision, or "".
    """

    format: str
    precision: str
    requirement: Requirement
    why_no_visible: Callable[[str], str]

    def why_not(self, precision: str, accelerator: str, *, has_kernels: bool) -> str:
        """Return why these kernels cannot be used here, or "".

        Args:
            precision, accelerator: the names of the components.
            has_kernels: whether the accelerator is an NVIDIA GPU.
        """
        if why := self.requirement.why_not(precision):
            return why
        if not has_kernels:
            return (
                f"precision={precision!r}: the accelerator {accelerator!r} has no {self.format} "
                f"kernels: pass precision='bf16-mixed', or plugins={self.precision}(emulate=True) "
                "to try the rounding, slowly"
            )
        return self.why_no_visible(precision)


FLOAT8_KERNELS = Kernels("float8", "Float8Precision", TORCHAO, why_no_visible_float8)
MXFP8_KERNELS = Kernels("MXFP8", "MXFP8Precision", TORCHAO_MX, why_no_visible_mxfp8)


def _in_plan(kernels: Kernels, plan: Any) -> str:
    accelerator = plan.accelerator
    # An accelerator object with another name is checked in the bind() of the precision.
    has_kernels = accelerator.name == "cuda" or accelerator.spec is None
    return kernels.why_not(plan.precision.name, accelerator.name, has_kernels=has_kernels)
