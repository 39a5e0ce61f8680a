"""The cluster environments of the torch-native backend, as data; torch is not imported here."""

from __future__ import annotations

from stratagem.discovery import ClusterEnvironmentSpec, ComponentSpec


def environments() -> tuple[ComponentSpec, ...]:
    """Return the cluster environments; see their classes for what each reads."""
    return (
        ClusterEnvironmentSpec(
            name="plain",
            target="stratagem.native.environments.plain:PlainEnvironment",
            api_version=1,
            summary="MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK and LOCAL_RANK, or one node",
        ),
        ClusterEnvironmentSpec(
            name="TorchElastic",
            target="stratagem.native.environments.torchelastic:TorchElasticEnvironment",
            api_version=1,
            summary="torchrun",
            variables=("TORCHELASTIC_RUN_ID",),
            priority=20,
        ),
    )
