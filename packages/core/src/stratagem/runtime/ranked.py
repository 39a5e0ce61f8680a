"""Ranked: what both front ends say of the processes that train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from stratagem.interfaces.ranks import Ranks


class Ranked(ABC):
    """Names of `ranks` that users read most; a subclass has the ranks."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The processes that train together; collectives work once they are launched."""

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_global_zero

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)
