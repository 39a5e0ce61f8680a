"""Loaders of ranks, the order of samples, resuming within an epoch, and nested batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.data.combined_loader import CombinedLoader as CombinedLoader
    from stratagem.data.pytree import (
        map_items as map_items,
        map_tensors as map_tensors,
        move_to_device as move_to_device,
    )
    from stratagem.data.sharding import (
        UNKNOWN as UNKNOWN,
        ShardedSampler as ShardedSampler,
        divides_data as divides_data,
        length_of as length_of,
        sampler_of as sampler_of,
        with_sampler as with_sampler,
    )
    from stratagem.rng import generators_of_loader as generators_of_loader
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
