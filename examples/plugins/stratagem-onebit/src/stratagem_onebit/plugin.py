"""What this distribution provides, as data."""

from collections.abc import Iterator

from stratagem.discovery import (
    Capabilities,
    CheckpointIOSpec,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)

CAPABILITIES = Capabilities.parallel()


@hookimpl
def stratagem_components() -> Iterator[ComponentSpec]:
    """Describe the strategy, its preset and the checkpoint format."""
    for name, options in (("onebit", {}), ("onebit_warm", {"warmup_steps": 100})):
        yield StrategySpec(
            name=name,
            target="stratagem_onebit.strategy:OneBitStrategy",
            api_version=2,
            summary="Gradients of 1 bit an element, with error feedback",
            init_args=options,
            capabilities=CAPABILITIES,
        )
    yield CheckpointIOSpec(
        name="sqlite",
        target="stratagem_onebit.checkpoint_io:SqliteCheckpointIO",
        api_version=2,
        summary="A SQLite database with checksums, replaced atomically",
    )
