"""The state of models and optimizers in memory: names, shards, weights-only-safe data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.state.safe_data import find_offending_value as find_offending_value
    from stratagem.state.state_dict import (
        check_weights as check_weights,
        load_named_state as load_named_state,
        matching_groups as matching_groups,
        named_state as named_state,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "stratagem.state.safe_data": "find_offending_value",
            "stratagem.state.state_dict": (
                "check_weights load_named_state matching_groups named_state"
            ),
        },
    )
