"""The components of this distribution, as specs; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.discovery import Capabilities, Command, ComponentSpec, StrategySpec, hookimpl

MESH = Capabilities.parallel(
    sharded_state=True,
    # Forward gathers parameters, so all ranks must run the same number of batches.
    allows_uneven_eval=False,
    follows_evaluation=True,
)
"""The capabilities of a mesh."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the strategy."""
    return (
        StrategySpec(
            name="mesh",
            target="stratagem_mesh.strategy:MeshStrategy",
            api_version=2,
            summary="Pipeline, data, context, tensor and expert parallelism over any model",
            capabilities=MESH,
            shards=("parameters", "gradients", "optimizer"),
        ),
    )


@hookimpl
def stratagem_cli() -> Iterable[Command]:
    """Return the commands that compare a mesh with one process, and draw a schedule."""
    return (
        Command(
            "mesh check",
            "Compare a step of a model on a mesh with one process.",
            "stratagem_mesh.check.command:run",
        ),
        Command(
            "mesh draw",
            "Draw the schedule of a pipeline: stages by time.",
            "stratagem_mesh.pipeline.command:run",
        ),
    )
