"""The strategies of the torch-native backend, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import Capabilities, ComponentSpec, StrategySpec

DDP = Capabilities(
    launchers=("script", "spawn", "fork"),
    one_process=False,
    many_devices=True,
    multi_node=True,
)
"""What DistributedDataParallel can do."""


def strategies() -> tuple[ComponentSpec, ...]:
    """Return the strategies."""
    return (
        StrategySpec(
            name="single_device",
            target="stratagem.interfaces.single_device:SingleDeviceStrategy",
            api_version=1,
            summary="One process, one device",
        ),
        StrategySpec(
            name="ddp",
            target="stratagem.native.strategies.ddp:DDPStrategy",
            api_version=1,
            summary="DistributedDataParallel, one process a device; runs the script again for each",
            capabilities=DDP,
        ),
    )
