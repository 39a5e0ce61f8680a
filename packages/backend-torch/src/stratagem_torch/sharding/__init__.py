"""The base of sharded strategies and its parts, for authors of strategies.

Example:
    >>> from stratagem_torch.sharding import ShardedStrategy
    >>> ShardedStrategy.__mro__[1].__name__
    'ParallelStrategy'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem_torch.sharding.clipping import (
        clip_by_norm as clip_by_norm,
        clip_by_value as clip_by_value,
        global_norm as global_norm,
    )
    from stratagem_torch.sharding.deferred import DeferredBuild as DeferredBuild
    from stratagem_torch.sharding.layout import (
        average_gradients as average_gradients,
        distribute_like as distribute_like,
        distribute_state as distribute_state,
        find_replicated as find_replicated,
        is_replicated as is_replicated,
        keep_whole as keep_whole,
        shards_of as shards_of,
        whole_on_cpu as whole_on_cpu,
    )
    from stratagem_torch.sharding.user_access import groups_of as groups_of
    from stratagem_torch.sharding.wrap_policy import WrapPolicy as WrapPolicy
    from stratagem_torch.strategies.sharded import (
        ShardedPrepared as ShardedPrepared,
        ShardedStrategy as ShardedStrategy,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
