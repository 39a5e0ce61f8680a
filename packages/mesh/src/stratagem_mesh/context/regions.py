"""The modules of a model that compute parts of a sequence, one on each rank of the context axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn


class ContextRegions:
    """Divides sequences in the modules of a model between the ranks of a group.

    Args:
        group: the ranks that share a sequence, in its order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def divide(self, model: nn.Module, names: Sequence[str] | None) -> None:
        """Let each rank compute a part of the sequence in the modules of these names, in place."""
        raise NotImplementedError
