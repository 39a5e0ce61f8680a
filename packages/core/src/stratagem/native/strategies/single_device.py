"""SingleDeviceStrategy: one process, one device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.discovery.capabilities import Capabilities
from stratagem.interfaces.strategy import ReduceOp, Strategy


class SingleDeviceStrategy(Strategy):
    """Trains in one process on one device; collectives give back what they are given.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> Trainer(strategy=SingleDeviceStrategy(), logger=False).world_size
        1
    """

    capabilities = Capabilities()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Return the tensor with a new first dim of size 1."""
        return tensor.unsqueeze(0)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return the data."""
        return data

    def gather_plain(self, data: Any) -> list[Any]:
        """Return the data in a list."""
        return [data]

    def barrier(self, name: str = "") -> None:
        """Return at once."""
