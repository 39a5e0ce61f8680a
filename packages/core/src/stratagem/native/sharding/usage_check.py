"""Seeing, in the first backward, that all ranks use the same parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from stratagem.errors import UserCodeError


class CheckedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduction of a group's gradients, which first compares their sizes between ranks.

    FSDP2 reduces the gradients that a rank has. Where ranks have different ones, the communication
    library ends the process without a word on the cause, or mixes gradients up. Only the first
    reduction is compared: it costs a collective.
    """

    def __init__(self) -> None:
        self._compared = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if not self._compared:
            self._compared = True
            _compare(input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _compare(gradients: Tensor, group: dist.ProcessGroup) -> None:
    own = torch.tensor(gradients.numel(), device=gradients.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group)
    if len({int(size) for size in sizes}) > 1:
        raise UserCodeError(
            "ranks have gradients of different parameters in the first backward (elements by rank: "
            f"{', '.join(str(int(size)) for size in sizes)}): expected every rank to use the same "
            "ones. Pass FSDPStrategy(find_unused_parameters=True) (torch 2.13 or later) where "
            "a rank leaves some out"
        )
