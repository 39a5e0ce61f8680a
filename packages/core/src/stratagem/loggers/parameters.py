"""Hyperparameters in the forms that loggers store: mappings, weights-only-safe data, flat texts."""

from __future__ import annotations

import dataclasses
import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stratagem.errors import ConfigurationError


def as_mapping(params: Any) -> dict[Any, Any]:
    """Return hyperparameters as a dict of their own, whatever holds them.

    Args:
        params: a mapping, an argparse.Namespace or a dataclass; None: there are none.

    Raises:
        ConfigurationError: it is something else.

    Example:
        >>> as_mapping(Namespace(rate=0.1))
        {'rate': 0.1}
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    if isinstance(params, Namespace):
        return dict(vars(params))
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    raise ConfigurationError(
        f"log_hyperparams({params!r:.80}): expected a dict, an argparse.Namespace or a dataclass, "
        f"received a {type(params).__name__}"
    )


def as_plain(value: Any) -> Any:
    """Return nested hyperparameters of dicts, lists, texts, numbers and None; of others the text.

    Example:
        >>> as_plain({"sizes": (1, 2), 7: Namespace(dtype=torch.float32)})
        {'sizes': [1, 2], '7': {'dtype': 'torch.float32'}}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Mapping, Namespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return {str(key): as_plain(held) for key, held in as_mapping(value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(held) for held in value]
    number = _number(value)
    return str(value) if number is None else number


def write_hyperparameters(file: Path, params: Any) -> None:
    """Write hyperparameters as JSON; in a file that ends in .yaml, with YAML 1.1's numbers.

    Args:
        file: to write.
        params: as `as_mapping` takes them.
    """
    text = json.dumps(as_plain(as_mapping(params)), indent=2)
    if file.suffix == ".yaml":
        text = _NOT_YAML.sub(_of_yaml, text)
    file.write_text(text + "\n")


_NOT_YAML = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?=e)|(?<=-)Infinity|Infinity|NaN')
"""A text, which is left alone; the digits of 1e-05, which YAML 1.1 takes for a text; no number."""
_WORDS = {"Infinity": ".inf", "NaN": ".nan"}


def _of_yaml(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.startswith('"') else _WORDS.get(text, f"{text}.0")


def _number(value: Any) -> bool | int | float | None:
    """Return the number that a scalar of NumPy or torch is, or None."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else None
    return number if isinstance(number, (bool, int, float)) else None


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
    """Return values as numbers, their names after `prefix` and "-", where there is one.

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
