"""What this plugin provides, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import AcceleratorSpec, Availability, ComponentSpec, hookimpl


def availability() -> Availability:
    """Return the four devices."""
    return Availability(4, "4 simulated devices")


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the accelerator."""
    return (
        AcceleratorSpec(
            name="sim",
            target="simulated.accelerator:SimulatedAccelerator",
            api_version=2,
            summary="Four devices in host memory, for tests",
            probe=availability,
        ),
    )
