"""What of a state is saved: Fabric's `filter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Filter = Mapping[str, Callable[[str, Any], bool]]
"""For names in a state, a function of a key and its value: whether to save it."""


def filtered(state: Mapping[str, Any], filter: Any) -> dict[str, Any]:
    """Return the part of a state that a filter keeps.

    Args:
        state: models, dicts and single values; a single value is kept.
        filter: see `Filter`.

    Raises:
        TypeError: `filter` is not a dict of functions.
        ValueError: `filter` has a name that is not in `state`.
    """
    if not isinstance(filter, Mapping):
        raise TypeError(
            f"save(filter={filter!r}): expected a dict of functions, by names in the state"
        )
    if strangers := filter.keys() - state.keys():
        raise ValueError(
            f"save(filter=...) names {', '.join(map(repr, sorted(strangers)))}; expected names in "
            f"the state, which has {', '.join(map(repr, state))}"
        )
    for name, keep in filter.items():
        if not callable(keep):
            raise TypeError(
                f"save(filter={{{name!r}: {keep!r}}}): expected a function of a key and its value"
            )
    kept: dict[str, Any] = {}
    for name, value in state.items():
        if name not in filter or not (hasattr(value, "state_dict") or isinstance(value, Mapping)):
            kept[name] = value  # keep a single value
            continue
        items: Iterable[tuple[str, Any]] = (
            value.state_dict() if hasattr(value, "state_dict") else value
        ).items()
        kept[name] = {key: part for key, part in items if filter[name](key, part)}
    return kept
