"""`gpus` and `tpu_cores`: Lightning's shorthands for an accelerator and its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigurationError


def expand_shorthands(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a front end's arguments, with accelerator and devices for a shorthand.

    Raises:
        ConfigurationError: both spellings were used.

    Example:
        >>> expand_shorthands({"gpus": 2, "precision": 16})
        {'precision': 16, 'accelerator': 'gpu', 'devices': 2}
    """
    expanded = dict(options)
    for shorthand, name in (("gpus", "gpu"), ("tpu_cores", "tpu")):
        value = expanded.pop(shorthand, None)
        if not value:
            continue  # 0 of them means the CPU, as devices=0 does
        accelerator, devices = expanded.get("accelerator", "auto"), expanded.get("devices", "auto")
        if accelerator not in ("auto", name, None) or devices not in ("auto", None):
            raise ConfigurationError(
                f"{shorthand}={value!r} is short for accelerator={name!r} and devices={value!r}; "
                f"received accelerator={accelerator!r} and devices={devices!r} as well: give one "
                "or the other"
            )
        expanded |= {"accelerator": name, "devices": value}
    return expanded
