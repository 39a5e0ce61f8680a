"""Ranks without a batch follow the all-gathers of another rank's forward passes under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from stratagem_torch.sharding.user_access import groups_of


def forget_evaluations(parts: Iterable[FSDPModule]) -> None:
    """Let FSDP2 note the order of groups in forward passes with gradients only.

    In that order, backward gathers groups ahead. Ranks that ran other numbers of evaluation steps
    would gather different groups. In a long evaluation the list would grow with each step.
    """
    for group in _groups_in(parts):
        group._record_post_forward = _with_gradients_only(group._record_post_forward)


def _with_gradients_only(record: Callable[[], None]) -> Callable[[], None]:
    def record_with_gradients() -> None:
        if torch.is_grad_enabled():
            record()

    return record_with_gradients


@contextmanager
def announcing(parts: Sequence[FSDPModule], announce: Callable[[int], None]) -> Iterator[None]:
    """Announce each all-gather of parameters before it begins.

    The number is `2 * index` of the parameter group, plus one if the group gathers parameters that
    were resharded over fewer ranks after a forward (`reshard_after_forward`). Ranks can therefore
    follow any control flow.

    Args:
        parts: the modules that gather parameters, in the same order on each rank.
        announce: called with the number.
    """
    groups = _groups_in(parts)
    for index, group in enumerate(groups):
        group.unshard = _announced(group, index, announce)
    try:
        yield
    finally:
        for group in groups:
            del group.unshard


def _announced(group: Any, index: int, announce: Callable[[int], None]) -> Callable[..., None]:
    gather = group.unshard

    def unshard(async_op: bool = False) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            announce(2 * index + group.is_sharded_post_forward)
        gather(async_op)

    return unshard


def follow(parts: Sequence[FSDPModule], announced: Iterable[int]) -> None:
    """Take part in the all-gathers that another rank announces, and free the gathered parameters.

    Args:
        parts: see `announcing`.
        announced: the numbers.
    """
    groups = _groups_in(parts)
    for number in announced:
        group = groups[number // 2]
        if number % 2 == 0:
            group.reshard()  # over all ranks, which gather it
        group.unshard()
        group.wait_for_unshard()
        if group._use_post_forward_mesh:
            group._to_sharded_post_forward()
        else:
            group.reshard()
    for group in groups:
        group.reshard()


def _groups_in(parts: Iterable[FSDPModule]) -> list[Any]:
    return [group for part in parts for group in groups_of(part)]
