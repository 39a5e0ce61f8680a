"""What this distribution provides, as data: neither torch nor torchft is imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec, hookimpl

TORCHFT = Capabilities.parallel(
    accelerators=("cpu", "cuda"),
    # A step counts once all replicas have agreed on it, and a replica that joins goes on from a
    # checkpoint of the others: both need a loop that the strategy can speak to, the Trainer's.
    manual_backward=False,
)
"""What the strategy can do; the spec and the class hold the same object."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        StrategySpec(
            name="torchft",
            target="stratagem_torchft.strategy:TorchFTStrategy",
            api_version=2,
            summary="Data parallel over replicas that may die and rejoin (torchft)",
            capabilities=TORCHFT,
        ),
    )
