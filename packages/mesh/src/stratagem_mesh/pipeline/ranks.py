"""PipelineRanks: the groups of ranks along a pipeline, and of each of its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist


class PipelineRanks:
    """The process groups of a mesh with a pipeline as its first axis; made on every rank.

    Rank 0 has the last position of the pipeline.

    Args:
        count: the number of positions of the pipeline.
        tensor: the size of the tensor axis, which is the last one.
        device: the device of this rank.
        timeout: the timeout of collectives, in seconds.

    Attributes:
        count, device: the arguments.
        position: the position of this rank.
        column: the global ranks by position, at this rank's place on the other axes.
        groups: two groups of the column; see `Transfers`.
        stage_group: the ranks at this position.
        last_stage: the ranks at the last position, which log values in training.
        of_stage: the number of ranks at a position.
        data_ranks: the number of ranks at a position that compute other gradients of a parameter.
    """

    def __init__(self, count: int, tensor: int, device: torch.device, timeout: float) -> None:
        rank, self._world = dist.get_rank(), dist.get_world_size()
        self.count, self.device, self._tensor = count, device, tensor
        self._timeout = timedelta(seconds=timeout)
        self.of_stage = self._world // count
        self.position = self._position(rank)
        self._place = rank % self.of_stage
        self.column = self._column(self._place)
        self.data_ranks = self.of_stage // tensor
        columns = [self._column(place) for place in range(self.of_stage)]
        self.groups = self._one_of(columns), self._one_of(columns)
        stages = [
            range(first, first + self.of_stage) for first in range(0, self._world, self.of_stage)
        ]
        self.stage_group = self._one_of(stages)
        self.last_stage = range(self.of_stage)
        self._shared: dict[frozenset[int], dist.ProcessGroup | None] = {}

    def _position(self, rank: int) -> int:
        return self.count - 1 - rank // self.of_stage

    def _column(self, place: int) -> tuple[int, ...]:
        return tuple((self.count - 1 - p) * self.of_stage + place for p in range(self.count))

    def make_shared(self, sets: Iterable[Collection[int]]) -> None:
        """Make a group for each set of positions that share parameters; on every rank alike."""
        for positions in sorted({tuple(sorted(each)) for each in sets}):
            key = frozenset(positions)
            if key in self._shared:
                continue
            groups = [
                [
                    r
                    for r in range(self._world)
                    if self._position(r) in key and r % self._tensor == t
                ]
                for t in range(self._tensor)
            ]
            self._shared[key] = self._own_group(groups)

    def shared(self, positions: Collection[int]) -> dist.ProcessGroup:
        """Return the ranks at these positions at this rank's place on the tensor axis."""
        return _present(self._shared[frozenset(positions)])

    def _one_of(self, groups: Iterable[Iterable[int]]) -> dist.ProcessGroup:
        """Make all groups, and return the one of this rank."""
        return _present(self._own_group(groups))

    def _own_group(self, groups: Iterable[Iterable[int]]) -> dist.ProcessGroup | None:
        """Make all groups, and return the one of this rank, if there is one."""
        own: dist.ProcessGroup | None = None
        for ranks in map(sorted, groups):
            group = dist.new_group(ranks, timeout=self._timeout)
            if dist.get_rank() in ranks:
                own = group
        return own


def _present(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group


@lru_cache
def pipeline_ranks(
    count: int,
    tensor: int,
    device: torch.device,
    timeout: float,
    world: dist.ProcessGroup | None,
) -> PipelineRanks:
    """Return the ranks; the same object for all strategies of a process, since it makes groups."""
    return PipelineRanks(count, tensor, device, timeout)
