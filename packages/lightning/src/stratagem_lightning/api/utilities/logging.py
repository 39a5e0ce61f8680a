"""What loggers of libraries do with values, hyperparameters and checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

_KEPT = (bool, int, float, str, Tensor)
"""The types of hyperparameters that remain as they are."""


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Return values with a prefix before each name.

    Example:
        >>> add_prefix({"loss": 0.5}, "train", "-")
        {'train-loss': 0.5}
    """
    before = f"{prefix}{separator}" if prefix else ""
    return {f"{before}{name}": value for name, value in metrics.items()} if prefix else metrics


def convert_params(params: Mapping[str, Any] | Namespace | None) -> Any:
    """Return hyperparameters as a dict; {} for None."""
    return vars(params) if isinstance(params, Namespace) else ({} if params is None else params)


def flatten_dict(params: Any, delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Return nested hyperparameters on one level, with the names of all levels in each key.

    Example:
        >>> flatten_dict({"model": {"width": 3}, "layers": [{"size": 1}, {"size": 2}]})
        {'model/width': 3, 'layers/0/size': 1, 'layers/1/size': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{parent_key}{delimiter}{name}" if parent_key else str(name)
        flat.update(_flattened(key, value, delimiter))
    return flat


def _flattened(key: str, value: Any, delimiter: str) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    value = convert_params(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping):
        return flatten_dict(value, delimiter, key)
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        # Lightning has a slash before an index, whatever the delimiter is.
        parts = [flatten_dict(one, delimiter, f"{key}/{at}") for at, one in enumerate(value)]
        return {name: one for part in parts for name, one in part.items()}
    return {key: value}


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the names of classes and the results of functions.

    A function that requires an argument, or returns another function, is its own name.

    Example:
        >>> sanitize_callable_params({"kind": dict, "function": len, "rate": lambda: 0.1})
        {'kind': 'dict', 'function': 'len', 'rate': 0.1}
    """
    return {name: _called(value) for name, value in params.items()}


def _called(value: Any) -> Any:
    if not callable(value):
        return value
    name = getattr(value, "__name__", None)
    if isinstance(value, type):
        return name
    try:
        result = value()
    except Exception:  # anything that a user's function may raise
        return name
    return name if callable(result) else result


def sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Replace hyperparameters that are no plain values by their texts; return the same dict.

    Example:
        >>> sanitize_params({"width": 3, "sizes": [1, 2]})
        {'width': 3, 'sizes': '[1, 2]'}
    """
    for name, value in params.items():
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
            value = value.item()
        params[name] = value if type(value) in _KEPT else str(value)
    return params


def convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the texts of those that JSON does not have."""
    return {n: value if is_json_serializable(value) else str(value) for n, value in params.items()}


def is_json_serializable(value: Any) -> bool:
    """Whether JSON has a value; lists and dicts are not looked into."""
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def scan_checkpoints(
    checkpoint_callback: Any, logged_model_time: Mapping[str, float]
) -> list[tuple[float, str, Any, str]]:
    """Return the checkpoints that a logger has not uploaded yet, the oldest first.

    Args:
        checkpoint_callback: a ModelCheckpoint.
        logged_model_time: the time of each file that was uploaded, by path.

    Returns:
        For each, the time of the file, its path, its value, and "latest", "best" or "best_k".
    """
    known = {path: (score, tag) for path, score, tag in _known_checkpoints(checkpoint_callback)}
    found = [
        (Path(path).stat().st_mtime, str(path), score, tag)
        for path, (score, tag) in known.items()
        if Path(path).is_file()
    ]
    return sorted(
        (one for one in found if logged_model_time.get(one[1], float("-inf")) < one[0]),
        key=lambda one: one[:2],
    )


def _known_checkpoints(saver: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and tag; a later one counts for the same path."""
    for path, score, tag in (
        ("last_model_path", "current_score", "latest"),
        ("best_model_path", "best_model_score", "best"),
    ):
        if hasattr(saver, path) and hasattr(saver, score):
            yield getattr(saver, path), getattr(saver, score), tag
    for name, score in getattr(saver, "best_k_models", {}).items():
        yield name, score, "best_k"


def version_of(loggers: list[Any], separator: str = "_") -> int | str:
    """Return the version of a logger, or those of several in one text, each once."""
    versions = [logger.version for logger in loggers]
    first: int | str = versions[0]
    return first if len(versions) == 1 else separator.join(dict.fromkeys(map(str, versions)))
