"""Checkpoints of older formats, brought to the present one step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem._version import __version__
from stratagem.errors import CheckpointCorruptError
from stratagem.storage import paths as storage

FORMAT_VERSION = 2


def migrate(checkpoint: dict[str, Any], path: storage.Location | str) -> dict[str, Any]:
    """Return a Trainer's checkpoint in the present format.

    Raises:
        CheckpointCorruptError: it is of a newer format.
    """
    version = checkpoint.get("format_version", 1)
    if version > FORMAT_VERSION:
        raise CheckpointCorruptError(
            f"{str(path)!r} has format version {version}, made by stratagem "
            f"{checkpoint.get('stratagem_version')}; this is stratagem {__version__}, which reads "
            f"up to version {FORMAT_VERSION}: upgrade stratagem-core"
        )
    while version < FORMAT_VERSION:
        checkpoint = _STEPS[version]({**checkpoint})
        version += 1
    return checkpoint


def _from_1(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Lacks `run`, and ModelCheckpoint's paths are whole; the first lack `validated` and `ranks`.

    Without `ranks`, an epoch goes on with other random numbers, as it did then.
    """
    checkpoint["run"] = ""
    if "progress" in checkpoint:
        checkpoint["progress"] = {"validated": 0, **checkpoint["progress"]}
        checkpoint["callbacks"] = {
            key: _relative_paths(state) if key.startswith("ModelCheckpoint(") else state
            for key, state in checkpoint["callbacks"].items()
        }
    return checkpoint


def _relative_paths(state: dict[str, Any]) -> dict[str, Any]:
    paths = [*state["best_k_models"], state["best_model_path"], state["last_model_path"]]
    folder = storage.parent(next((path for path in paths if path), "."))
    last = state["last_model_path"]
    return {
        "dirpath": str(folder),
        "best_k_models": {
            storage.relative(path, folder): value for path, value in state["best_k_models"].items()
        },
        "latest": [],
        "last_model_path": storage.relative(last, folder) if last else "",
    }


_STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""By the version that they take; each returns the next."""
