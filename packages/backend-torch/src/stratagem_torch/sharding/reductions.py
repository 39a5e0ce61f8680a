"""Reductions: ranks compare which gradients FSDP2 reduces together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stratagem.errors import UserCodeError
from stratagem_torch.sharding.user_access import groups_of


class Reductions:
    """Compares between ranks which parameters' gradients FSDP2 reduces together.

    FSDP2 reduces the gradients that a rank has, group by group. If ranks have gradients of
    different parameters, FSDP2 would add gradients of unrelated parameters, or the communication
    library would end the process without naming the cause.

    Ranks exchange 16 bytes when two groups are reduced in this order for the first time, and
    whenever this rank leaves out a parameter of the group. Any other reduction costs a look-up.

    Args:
        device: the device of the exchange.
        group: the ranks that reduce gradients together; None for all ranks. Other ranks may hold
            other layers.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self._compared: set[tuple[str, ...]] = set()
        self._last = ""

    def watch(self, root: nn.Module) -> None:
        """Compare before each reduction of a sharded model's groups."""
        root.register_forward_pre_hook(self._begin)
        for part in root.modules():
            if isinstance(part, FSDPModule):
                for group in groups_of(part):
                    if "post_backward" not in vars(group):
                        group.post_backward = self._comparing(group, group.post_backward)

    def _begin(self, *_: Any) -> None:
        self._last = ""  # the order of one backward

    def _comparing(self, group: Any, reduce: Callable[..., None]) -> Callable[..., None]:
        def compare_and_reduce(*unused: Any) -> None:
            if group.reduce_grads:
                own = tuple(p._param_fqn for p in group.fsdp_params if _has_gradient(p))
                trained = sum(p.sharded_param.requires_grad for p in group.fsdp_params)
                key = (self._last, *own)
                if own and (len(own) < trained or key not in self._compared):
                    self._compare([name.removeprefix("module.") for name in own])
                    self._compared.add(key)
                self._last = own[0] if own else self._last
            reduce(*unused)

        return compare_and_reduce

    def _compare(self, names: list[str]) -> None:
        text = "\n".join(names).encode()
        found = self._gather(torch.tensor([zlib.crc32(text), len(text)]))
        if all(one == found[0] for one in found):
            return
        # The shorter lists are filled up with ends of lines.
        text = text.ljust(max(length for _, length in found), b"\n")
        texts = self._gather(torch.tensor([*text], dtype=torch.uint8))
        of_ranks = [bytes(one).decode().split() for one in texts]
        everywhere = set(of_ranks[0]).intersection(*of_ranks)
        apart = [[name for name in of_rank if name not in everywhere] for of_rank in of_ranks]
        lists = (f"rank {rank}: {_some(own)}" for rank, own in enumerate(apart))
        raise UserCodeError(
            f"ranks have gradients of different parameters in one backward ({'; '.join(lists)}): "
            "expected every rank to use the same ones. Pass FSDPStrategy("
            "find_unused_parameters=True) (torch 2.13 or later) where a rank leaves some out, or "
            "DDPStrategy(find_unused_parameters=True)"
        )

    def _gather(self, own: Tensor) -> list[list[int]]:
        own = own.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own, self._group)
        return [one.tolist() for one in gathered]


def _has_gradient(parameter: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    whole, held = parameter._unsharded_param, parameter.unsharded_accumulated_grad
    return held is not None or whole.grad is not None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) or "none of its own") + more
