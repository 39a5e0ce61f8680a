"""Hyperparameters as loggers store them: mappings and weights-only-safe data."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

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
        >>> import torch
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


def _number(value: Any) -> bool | int | float | None:
    """Return the number that a scalar of NumPy or torch is, or None."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else None
    return number if isinstance(number, (bool, int, float)) else None
