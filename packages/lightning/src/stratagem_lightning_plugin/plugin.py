"""What this distribution provides, as data; nothing is imported here."""

from __future__ import annotations

from typing import Any

from stratagem.discovery import Check, CheckpointIOSpec, ComponentSpec, NameSpec, hookimpl
from stratagem_lightning_plugin.installed import installed_lightning


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the checkpoint format of Lightning, and the command of `stratagem run`."""
    return (
        CheckpointIOSpec(
            name="lightning",
            target="stratagem_lightning_plugin.checkpoint_io:LightningCheckpointIO",
            api_version=2,
            summary="One file in the form that Lightning 2.x loads",
        ),
        NameSpec(
            name="stratagem.cli.lightning_command",
            target="stratagem_lightning_plugin.script:command",
            api_version=2,
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
    """Return a checkpoint of Lightning's in the form of a Trainer's."""
    from stratagem_lightning_plugin.checkpoint_format import from_lightning, is_lightnings

    return from_lightning(contents, path) if is_lightnings(contents) else None
