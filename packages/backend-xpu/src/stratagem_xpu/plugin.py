"""The components of this distribution, as specs; torch is not imported."""

from __future__ import annotations

from stratagem.discovery import AcceleratorSpec, ComponentSpec, hookimpl


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the accelerator."""
    return (
        AcceleratorSpec(
            name="xpu",
            target="stratagem_xpu.accelerator:XPUAccelerator",
            api_version=2,
            summary="Intel GPUs; xccl between ranks. Never run on hardware",
            aliases=("gpu",),
            probe="stratagem_xpu.probe:xpu_availability",
            priority=95,
        ),
    )
