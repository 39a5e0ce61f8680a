"""DDPStrategy: DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stratagem.interfaces.parallel import ParallelStrategy
from stratagem.interfaces.strategy import Prepared
from stratagem.native.strategy_specs import DDP


class DDPStrategy(ParallelStrategy):
    """Replicates the model on every rank and averages gradients during backward.

    Subclasses may override `configure_ddp`, which wraps `self.model`.

    Args:
        find_unused_parameters: allow parameters that a forward pass does not use; costs a
            traversal of the graph at each step.
        static_graph: the graph is the same at every step.
        gradient_as_bucket_view: let gradients share memory with the communication buckets.
        bucket_cap_mb: bucket size in MiB; None: torch's default.
        **parts: see `ParallelStrategy`.

    Example:
        >>> from stratagem.strategies import DDPStrategy
        >>> DDPStrategy(static_graph=True).capabilities.multi_node
        True
    """

    capabilities = DDP

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.ddp_arguments = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module in DDP.

        Evaluation calls it without DDP, whose forward broadcasts buffers: ranks may then run
        different numbers of batches.
        """
        self.model = module
        # DDP refuses a module without gradients; such a model (a metric, a frozen teacher) needs
        # no communication.
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.configure_ddp()
        return self.model

    def configure_ddp(self) -> None:
        """Wrap `self.model`."""
        device_ids = None if self.device.type == "cpu" else [self.device]
        self.model = DistributedDataParallel(
            self.model,
            device_ids=device_ids,
            **self.ddp_arguments,  # type: ignore[arg-type]
        )

    def before_evaluation(self, prepared: Prepared) -> None:
        """Give every rank the buffers of rank 0, which are the ones that are saved."""
        for buffer in prepared.original.buffers():
            dist.broadcast(buffer, 0)

    def no_sync(self, prepared: Prepared) -> AbstractContextManager[Any] | None:
        """Return DDP's context without gradient communication."""
        model = prepared.module
        return model.no_sync() if isinstance(model, DistributedDataParallel) else None
