"""The state of models and optimizers in memory: names, shards, weights-only-safe data."""

from __future__ import annotations

from stratagem.state.safe_data import find_offending_value
from stratagem.state.state_dict import (
    check_weights,
    load_named_state,
    matching_groups,
    named_state,
)

__all__ = [
    "check_weights",
    "find_offending_value",
    "load_named_state",
    "matching_groups",
    "named_state",
]
