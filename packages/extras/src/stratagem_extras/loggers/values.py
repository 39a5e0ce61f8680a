"""Values and hyperparameters in the forms that services and files store."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.loggers import as_mapping, as_plain


def write_hyperparameters(file: Path, params: Any) -> None:
    """Write hyperparameters as YAML: JSON, with YAML 1.1's numbers.

    Args:
        file: to write.
        params: as `as_mapping` takes them.
    """
    text = json.dumps(as_plain(as_mapping(params)), indent=2)
    file.write_text(_NOT_YAML.sub(_of_yaml, text) + "\n")


_NOT_YAML = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?=e)|(?<=-)Infinity|Infinity|NaN')
"""A text, which is left alone; the digits of 1e-05, which YAML 1.1 takes for a text; no number."""
_WORDS = {"Infinity": ".inf", "NaN": ".nan"}


def _of_yaml(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.startswith('"') else _WORDS.get(text, f"{text}.0")


def flattened(params: Any, separator: str = "/") -> dict[str, Any]:
    """Return hyperparameters as one level of plain values; lists become texts.

    Example:
        >>> flattened({"model": {"width": 3, "sizes": [1, 2]}})
        {'model/width': 3, 'model/sizes': '[1, 2]'}
    """
    flat: dict[str, Any] = {}
    for key, value in as_plain(as_mapping(params)).items():
        if isinstance(value, dict):
            inner = flattened(value, separator)
            flat.update({f"{key}{separator}{name}": held for name, held in inner.items()})
        else:
            flat[key] = str(value) if isinstance(value, list) else value
    return flat


def as_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return values as numbers, with names after `prefix` and "-" if a prefix is given.

    Raises:
        ConfigurationError: one is no number.
    """
    begin = f"{prefix}-" if prefix else ""
    return {f"{begin}{name}": _as_number(name, value) for name, value in metrics.items()}


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"log_metrics: {name}={value!r:.80} is no number ({error}); expected a number, or a "
            "tensor with one value"
        ) from error
