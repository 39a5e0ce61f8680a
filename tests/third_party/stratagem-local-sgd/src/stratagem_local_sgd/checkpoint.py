"""JsonSidecarCheckpointIO: another format's checkpoint, and what is in it as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stratagem.checkpoint import CheckpointIO, SingleFileCheckpointIO


class JsonSidecarCheckpointIO(CheckpointIO):
    """Leaves checkpoints to `inner` and writes `<path>.json` with the step and the keys.

    So that a person, or a program without torch, sees what a checkpoint is.

    Args:
        inner: what writes and reads the checkpoint itself; None: a single file.
    """

    def __init__(self, inner: CheckpointIO | None = None) -> None:
        self.inner = SingleFileCheckpointIO() if inner is None else inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write the checkpoint, then the file beside it; see `CheckpointIO.save_checkpoint`."""
        # In this order, so that the small file never describes what is not there.
        self.inner.save_checkpoint(checkpoint, path)
        described = {"step": checkpoint.get("global_step"), "keys": sorted(map(str, checkpoint))}
        sidecar = sidecar_of(path)
        temporary = sidecar.with_name(f".{sidecar.name}.tmp")
        temporary.write_text(json.dumps(described, indent=2) + "\n")
        temporary.replace(sidecar)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint at `path`; see `CheckpointIO.load_checkpoint`."""
        return self.inner.load_checkpoint(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove both files, if they are there."""
        sidecar_of(path).unlink(missing_ok=True)
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Finish what `inner` is still writing."""
        self.inner.teardown()


def sidecar_of(path: str | Path) -> Path:
    """Return where the JSON file of the checkpoint at `path` is."""
    return Path(f"{path}.json")
