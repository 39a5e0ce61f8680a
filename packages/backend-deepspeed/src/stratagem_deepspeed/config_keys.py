"""Refuses keys that DeepSpeed's config does not have, before a process starts.

DeepSpeed ignores what it does not know at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.discovery import nearest_of
from stratagem.errors import ConfigurationError
from stratagem_deepspeed.known_keys import KNOWN_KEYS


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise for keys that DeepSpeed's config does not have.

    Raises:
        ConfigurationError: names the key, and the one that it resembles.
    """
    for path, known in KNOWN_KEYS.items():
        section: Any = config
        for key in path:
            section = section.get(key) if isinstance(section, Mapping) else None
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ConfigurationError(
                f"config: {'.'.join(path)}={section!r}: expected a section (a dict) with keys of "
                f"{', '.join(sorted(known))}"
            )
        _check(section, known, path)


def _check(section: Mapping[str, Any], known: frozenset[str], path: tuple[str, ...]) -> None:
    for key in section:
        if key in known:
            continue
        near = nearest_of(str(key), sorted(known))
        hint = (
            f"did you mean {'.'.join((*path, near))!r}?"
            if near
            else f"expected one of {', '.join(sorted(known))}"
        )
        raise ConfigurationError(
            f"config: {'.'.join((*path, str(key)))!r} is not a key of DeepSpeed's config; {hint}"
        )
