"""The user's config, read more strictly than JSON asks for: what DeepSpeed would take wrongly."""

from __future__ import annotations

import copy
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem_deepspeed.config_keys import check_keys

_LARGEST = 16 << 20
"""Bytes of a file; real ones have some thousands."""
_DEEPEST = 32
"""Levels; DeepSpeed's own keys have four."""


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a copy of the user's config as a dict.

    Args:
        config: a dict, or the path of a JSON file.

    Raises:
        ConfigurationError: the file is missing, no regular file or not JSON, a key is unknown or
            repeated, or a number is not finite; the message names the cause.
    """
    if config is None:
        return {}
    loaded: Any
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        loaded, source = _load(path), f"the file {str(path)!r}"
    else:
        loaded, source = config, "config"
    if not isinstance(loaded, Mapping):
        raise ConfigurationError(
            f"{source} holds a {type(loaded).__name__}; expected a dict with DeepSpeed's config"
        )
    _check_values(loaded, source, ())
    own = copy.deepcopy(dict(loaded))
    if "bfloat16" in own:  # its name in old configs
        own["bf16"] = own.pop("bfloat16")
    check_keys(own)
    return own


def _load(path: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        text = _read(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"config={str(path)!r} cannot be read ({reason}): pass the path of a JSON file with "
            "DeepSpeed's config, or a dict"
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ConfigurationError(
            f"config={str(path)!r} is not JSON: {error}. DeepSpeed's config is a JSON object"
        ) from error
    except RecursionError:
        raise _too_deep(f"the file {str(path)!r}", ()) from None
    except _DuplicateKey as error:
        raise ConfigurationError(
            f"config={str(path)!r} has the key {error.args[0]!r} twice in one section, and one "
            "of its values would be dropped: leave one of them out"
        ) from None


def _read(path: Path) -> bytes:
    # Check before opening: opening a named pipe blocks until another process writes into it.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST >> 20} MB")
    return text


class _DuplicateKey(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise _DuplicateKey(key)
        section[key] = value
    return section


def _check_values(value: Any, source: str, path: tuple[str, ...]) -> None:
    """Refuse numbers that are not finite, and sections within sections without end."""
    if len(path) > _DEEPEST:
        raise _too_deep(source, path[:3])
    if isinstance(value, Mapping):
        for key, held in value.items():
            _check_values(held, source, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for index, held in enumerate(value):
            _check_values(held, source, (*path, str(index)))
    else:
        check_finite(f"config: {'.'.join(path)}", value)


def check_finite(name: str, value: Any) -> None:
    """Raise if a value is NaN or infinite; other values are accepted.

    Raises:
        ConfigurationError: the number is not finite; the message has its name.

    Example:
        >>> from stratagem_deepspeed.config_file import check_finite
        >>> check_finite("gradient_clipping", 1.0)
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{name}={value!r}: expected a finite number")


def _too_deep(source: str, path: tuple[str, ...]) -> ConfigurationError:
    where = f" (below {'.'.join(path)!r})" if path else ""
    return ConfigurationError(
        f"{source} is nested more than {_DEEPEST} levels deep{where}: expected DeepSpeed's config, "
        "whose sections have a few levels"
    )
