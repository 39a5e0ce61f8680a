"""The components of this distribution, and the plans that it refuses; torch is not imported."""

from __future__ import annotations

from typing import Any

from stratagem.discovery import AcceleratorSpec, ComponentSpec, hookimpl
from stratagem.errors import ConfigurationError
from stratagem_mps.probe import has_bfloat16, macos_version

NAME = "mps"


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the accelerator."""
    return (
        AcceleratorSpec(
            name=NAME,
            target="stratagem_mps.accelerator:MPSAccelerator",
            api_version=2,
            summary="Apple silicon's GPU, one device. Never run on hardware",
            aliases=("gpu",),
            probe="stratagem_mps.probe:mps_availability",
            priority=80,
        ),
    )


@hookimpl
def stratagem_run_planned(plan: Any) -> None:
    """Refuse a plan that Metal cannot run; see `why_impossible`."""
    if plan.accelerator.name == NAME and (problem := why_impossible(plan, macos_version())):
        raise ConfigurationError(problem)


def why_impossible(plan: Any, macos: tuple[int, int]) -> str:
    """Return why a plan cannot run on this GPU, or "".

    Args:
        plan: the `RunPlan`.
        macos: the version of macOS, (major, minor).
    """
    precision = plan.precision.name
    if not plan.capabilities.one_process:
        return (
            f"accelerator='mps' is one device, and torch.distributed has no backend for it, "
            f"received strategy={plan.strategy.name!r}: pass strategy='single_device', or "
            "accelerator='cpu' for several processes"
        )
    if precision == "64-true":
        return (
            "precision='64-true': Metal has no float64, so accelerator='mps' cannot hold such "
            "tensors: pass precision='32-true', or accelerator='cpu'"
        )
    if precision.startswith("bf16") and not has_bfloat16(macos):
        return (
            f"precision={precision!r}: accelerator='mps' has bfloat16 from macOS 14 on, and this "
            f"is macOS {macos[0]}.{macos[1]}: pass precision='32-true', or update macOS"
        )
    return ""
