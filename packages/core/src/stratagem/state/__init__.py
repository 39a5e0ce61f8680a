"""The state of models and optimizers in memory: names, shards, weights-only-safe data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.state.reading.unpickler import (
        SafeUnpickler as SafeUnpickler,
        check_dims as check_dims,
    )
    from stratagem.state.safe_data import (
        bytes_of as bytes_of,
        check_safe_data as check_safe_data,
        decode as decode,
        encode as encode,
        find_offending_value as find_offending_value,
        from_bytes as from_bytes,
        pack_result as pack_result,
        to_bytes as to_bytes,
        unpack_result as unpack_result,
        why_refused as why_refused,
    )
    from stratagem.state.state_checks import check_optimizer_state as check_optimizer_state
    from stratagem.state.state_dict import (
        check_weights as check_weights,
        load_named_state as load_named_state,
        matching_groups as matching_groups,
        named_state as named_state,
        per_parameter_state as per_parameter_state,
        state_without_wrapper as state_without_wrapper,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
