"""The bases of strategies over torch.distributed, for authors of strategies.

Example:
    >>> from stratagem.strategies import DDPStrategy
    >>> from stratagem_torch.parallel import ParallelStrategy
    >>> issubclass(DDPStrategy, ParallelStrategy)
    True
"""

from stratagem_torch.distributed.activation_checkpointing import (
    ActivationCheckpointing,
    Recompute,
    apply_activation_checkpointing,
    check_activation_checkpointing,
    check_given_once,
)
from stratagem_torch.distributed.allocator import return_freed_memory, use_huge_pages
from stratagem_torch.distributed.parallel_strategy import ParallelStrategy
from stratagem_torch.distributed.process_group import ProcessGroupRanks, join_process_group
from stratagem_torch.distributed.state_by_owner import (
    is_owner,
    optimizer_state_by_owner,
    owned_model_state,
    owned_optimizer_state,
    state_by_owner,
)
from stratagem_torch.distributed.sync_batchnorm import synchronize_batch_norm

__all__ = [
    "ActivationCheckpointing",
    "ParallelStrategy",
    "ProcessGroupRanks",
    "Recompute",
    "apply_activation_checkpointing",
    "check_activation_checkpointing",
    "check_given_once",
    "is_owner",
    "join_process_group",
    "optimizer_state_by_owner",
    "owned_model_state",
    "owned_optimizer_state",
    "return_freed_memory",
    "state_by_owner",
    "synchronize_batch_norm",
    "use_huge_pages",
]
