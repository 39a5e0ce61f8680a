"""What this distribution provides, as data; nothing is imported here."""

from __future__ import annotations

from typing import Any

from stratagem.discovery import (
    Check,
    CheckpointIOSpec,
    ComponentSpec,
    hookimpl,
    version_of,
)

LIGHTNING = ("lightning", "pytorch-lightning", "lightning-fabric")
"""The distributions whose import names `stratagem_lightning` takes, in a process that asks."""


def installed_lightning() -> dict[str, str]:
    """Return which distributions of Lightning itself are installed, with their versions."""
    found = {name: version_of(name) for name in LIGHTNING}
    return {name: version for name, version in found.items() if version is not None}


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the checkpoint format of Lightning."""
    return (
        CheckpointIOSpec(
            name="lightning",
            target="stratagem_lightning_plugin.checkpoint_io:LightningCheckpointIO",
            api_version=1,
            summary="One file in the form that Lightning 2.x loads",
        ),
    )


@hookimpl
def stratagem_doctor() -> list[Check]:
    """Return a line for each distribution of Lightning itself that is installed."""
    return [
        Check(f"{name} {version}", "ok", "`stratagem run --as-lightning` uses Stratagem instead")
        for name, version in installed_lightning().items()
    ]


@hookimpl
def stratagem_read_checkpoint(contents: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return a checkpoint of Lightning's as one of a Trainer's."""
    from stratagem_lightning_plugin.checkpoint_format import from_lightning, is_lightnings

    return from_lightning(contents, path) if is_lightnings(contents) else None
