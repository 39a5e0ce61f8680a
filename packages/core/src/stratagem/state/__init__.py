"""The state of models and optimizers in memory: names, shards, weights-only-safe data."""

from __future__ import annotations

from stratagem.state.safe_data import check_safe_data, find_offending_value, from_bytes, to_bytes
from stratagem.state.state_checks import check_optimizer_state
from stratagem.state.state_dict import (
    check_weights,
    load_named_state,
    matching_groups,
    named_state,
    per_parameter_state,
    state_without_wrapper,
)

__all__ = [
    "check_optimizer_state",
    "check_safe_data",
    "check_weights",
    "find_offending_value",
    "from_bytes",
    "load_named_state",
    "matching_groups",
    "named_state",
    "per_parameter_state",
    "state_without_wrapper",
    "to_bytes",
]
