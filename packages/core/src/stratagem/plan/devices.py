"""What `devices=` may be: a number of devices, a list of them, or a string of either."""

from __future__ import annotations

from typing import Any

from stratagem.discovery.specs import Availability
from stratagem.errors import ConfigurationError


def parse_devices(asked: Any, found: Availability, accelerator: str) -> tuple[int, ...]:
    """Return device indices for a number of devices, a list of them, or a string of either."""
    value = asked
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        value = numbers if "," in value else (numbers[0] if numbers else None)
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0):
        return tuple(range(found.count if value == -1 else value))
    if isinstance(value, (list, tuple)) and value and all(is_index(index) for index in value):
        if len(set(value)) < len(value):
            raise ConfigurationError(f"devices={asked!r} names a device twice; name each once")
        if not found.indexed:
            raise ConfigurationError(
                f"devices={asked!r} chooses devices by index, but {accelerator} devices have none: "
                f"pass a number, such as devices={len(value)}"
            )
        return tuple(value)
    raise ConfigurationError(
        f"devices={asked!r}: expected a number of devices, -1 for all, a list of indices such as "
        "[1, 4] or '1, 4', or 'auto'"
    )


def is_index(value: object) -> bool:
    """Whether a value is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_zero(value: object) -> bool:
    """Whether a value is the number 0, not False."""
    return value == 0 and is_index(value)
