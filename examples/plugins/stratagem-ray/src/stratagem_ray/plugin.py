"""What this distribution provides, as data: Ray is not imported here."""

from __future__ import annotations

from stratagem.discovery import ClusterEnvironmentSpec, ComponentSpec, LauncherSpec, hookimpl


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this distribution provides."""
    return (
        LauncherSpec(
            name="ray",
            target="stratagem_ray.launcher:RayLauncher",
            api_version=2,
            summary="Actors of a Ray cluster; ranks that are lost are started again",
            interactive=True,
            new_processes=True,
            spans_nodes=True,
            devices_elsewhere=True,
            cluster_environment="ray_ranks",
        ),
        ClusterEnvironmentSpec(
            name="ray_ranks",
            target="stratagem_ray.environment:RayEnvironment",
            api_version=2,
            summary="What the launcher 'ray' has told each of its ranks",
            # LOCAL_RANK too, which a rank's own children do not have.
            variables=("STRATAGEM_RAY_RUN", "LOCAL_RANK"),
            priority=30,
        ),
    )
