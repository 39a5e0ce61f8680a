"""What this distribution provides, as data: neither torch nor bagua is imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec, hookimpl

BAGUA = Capabilities.parallel(
    accelerators=("cuda",),
    precisions=("32-true", "bf16-mixed"),
    backward_in_forward=False,
    accepts_existing_optimizers=False,  # Bagua hooks the optimizers that it is given with the model
    parameters="drift",  # between two averages of the decentralized and asynchronous algorithms
)
"""What the strategy can do; the spec and the class hold the same object."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        StrategySpec(
            name="bagua",
            target="stratagem_bagua.strategy:BaguaStrategy",
            api_version=2,
            summary="Bagua's communication algorithms; contract-tested, never run",
            capabilities=BAGUA,
        ),
    )
