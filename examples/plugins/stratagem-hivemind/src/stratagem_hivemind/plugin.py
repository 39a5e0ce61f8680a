"""What this distribution provides, as data: neither torch nor hivemind is imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec, hookimpl

HIVEMIND = Capabilities(
    accelerators=("cpu", "cuda"),
    # hivemind has a loss scaler of its own, so that of 16-mixed is not taken.
    precisions=("32-true", "64-true", "bf16-mixed", "bf16-true"),
    # A peer is a process of its own, started by whoever takes part.
    one_process=True,
)
"""What the strategy can do; the spec and the class hold the same object."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        StrategySpec(
            name="hivemind",
            target="stratagem_hivemind.strategy:HivemindStrategy",
            api_version=2,
            summary="Trains with peers over the internet that come and go (hivemind)",
            capabilities=HIVEMIND,
        ),
    )
