"""Ranks without a batch compute their experts for the tokens of the others' evaluation steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stratagem_mesh.expert.dispatch import Dispatch
from stratagem_torch.sharding import groups_of

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Divided = Mapping[nn.Module, Dispatch]


@contextmanager
def announcing(
    divided: Divided, parts: Sequence[FSDPModule], announce: Callable[[int], None]
) -> Iterator[None]:
    """Announce the calls of experts, by numbers above the numbers of all-gathers.

    Args:
        divided: the modules of experts, in the same order on each rank.
        parts: the modules that gather parameters.
        announce: called with a number.
    """
    first = 2 * len(_groups(parts))

    def announce_call(index: int, features: int, *dtypes: torch.dtype) -> None:
        for number in (first + index, features, *map(_DTYPES.index, dtypes)):
            announce(number)

    for index, dispatch in enumerate(divided.values()):
        dispatch.announce = partial(announce_call, index)
    try:
        yield
    finally:
        for dispatch in divided.values():
            dispatch.announce = None


def take_part(
    divided: Divided, parts: Sequence[FSDPModule], announced: Iterator[int]
) -> Iterator[int]:
    """Take part in announced calls of experts; yield the numbers of other all-gathers.

    Args:
        divided, parts: see `announcing`.
        announced: the numbers.
    """
    groups = _groups(parts)
    of_experts = {id(group) for module in divided for group in groups_of(module)}  # type: ignore[arg-type]
    modules = list(divided)
    for number in announced:
        if number >= 2 * len(groups):
            module = modules[number - 2 * len(groups)]
            features, *dtypes = (next(announced) for _ in range(3))
            with torch.no_grad():
                divided[module].take_part(features, (_DTYPES[dtypes[0]], _DTYPES[dtypes[1]]))
            for group in groups_of(module):  # type: ignore[arg-type]
                _free(group)
        elif id(groups[number // 2]) in of_experts:
            _gather(groups[number // 2], is_whole=number % 2 == 0)
        else:
            yield number


def _groups(parts: Sequence[FSDPModule]) -> list[Any]:
    return [group for part in parts for group in groups_of(part)]


def _gather(group: Any, *, is_whole: bool) -> None:
    """Gather parameters until the call of the experts; `is_whole`: over all ranks."""
    if is_whole:
        group.reshard()
    group.unshard()
    group.wait_for_unshard()


def _free(group: Any) -> None:
    """Free what the leading rank frees after a forward pass."""
    if group._use_post_forward_mesh:
        group._to_sharded_post_forward()
    elif group._reshard_after_forward:
        group.reshard()
