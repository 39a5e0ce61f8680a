"""What this distribution provides, as data: neither torch nor colossalai is imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec, hookimpl

COLOSSALAI = Capabilities.parallel(
    accelerators=("cpu", "cuda"),
)
"""What the strategy can do; the spec and the class hold the same object."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        StrategySpec(
            name="colossalai",
            target="stratagem_colossalai.strategy:ColossalAIStrategy",
            api_version=2,
            summary="Data parallel by ColossalAI's booster and its TorchDDP plugin",
            capabilities=COLOSSALAI,
        ),
    )
