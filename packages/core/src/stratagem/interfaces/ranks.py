"""Ranks: the processes that train together, and how this one communicates with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from stratagem.errors import ConfigurationError

ReduceOp = Literal["mean", "sum", "max", "min"]
DataSplit = tuple[int, int]
T = TypeVar("T")


class Ranks:
    """The processes that train together, as one of them sees them.

    This class is that of one process alone, whose collectives give back what they are given; a
    subclass communicates. A strategy makes one in `make_ranks`, and carries it as `ranks`, as Lite
    and the Trainer do. The numbers are there from `Strategy.bind` on; the collectives work once
    processes are launched, and are called by all ranks alike, in the same order.

    Args:
        global_rank: this process's rank among all.
        local_rank: its rank on its node.
        node_rank: its node's rank.
        world_size: the number of ranks.
        data_splits: the part of the data that each rank reads, (index, count), in the order of
            ranks; None: one of its own for each rank.

    Attributes:
        global_rank, local_rank, node_rank, world_size, data_splits: as given.
        device: where collectives return their tensors; None before the launch.
        data_groups: the ranks of each part of the data, in the order of its index. Those of one
            group work on the same batches, and count once where samples are counted.
        run_split: which part of the training data all these ranks read together, (index, count),
            where other runs train along (replicas, peers); a strategy sets it in `make_ranks`.

    Raises:
        ConfigurationError: the parts of the data do not fit together.

    Example:
        >>> from stratagem.strategies import Ranks
        >>> Ranks().all_gather(torch.ones(2)).shape
        torch.Size([1, 2])
        >>> # Two pipelines of two stages; ranks 0 and 2 read the first half of the data.
        >>> Ranks(world_size=4, data_splits=[(0, 2), (1, 2), (0, 2), (1, 2)]).data_groups
        ((0, 2), (1, 3))
    """

    def __init__(
        self,
        *,
        global_rank: int = 0,
        local_rank: int = 0,
        node_rank: int = 0,
        world_size: int = 1,
        data_splits: Sequence[DataSplit] | None = None,
    ) -> None:
        self.global_rank = global_rank
        self.local_rank = local_rank
        self.node_rank = node_rank
        self.world_size = world_size
        self.device: torch.device | None = None
        shards = [(rank, world_size) for rank in range(world_size)]
        self.data_splits = tuple(shards if data_splits is None else data_splits)
        self.data_groups = _groups(self.data_splits, world_size)
        self.run_split: DataSplit = (0, 1)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def data_split(self) -> DataSplit:
        """This rank's part of the data, (index, count); ranks of a tensor-parallel group share one.

        What a sampler divides for training is divided by it; an IterableDataset divides itself by
        it. With `run_split`, it counts the parts of other runs too.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> ranks = Ranks(global_rank=1, world_size=2)
            >>> ranks.run_split = (1, 3)  # the second of three runs
            >>> ranks.data_split, ranks.eval_split
            ((3, 6), (1, 2))
        """
        (index, count), (part, parts) = self.eval_split, self.run_split
        return part * count + index, parts * count

    @property
    def eval_split(self) -> DataSplit:
        """This rank's part of what these ranks evaluate, (index, count): together, all of it."""
        return self.data_splits[self.global_rank]

    @final
    def by_data_group(self, gathered: Sequence[T]) -> list[list[T]]:
        """Return what was gathered from every rank, ordered by the part of the data they share.

        Args:
            gathered: an item for each rank, in the order of ranks, as `gather_objects` returns it.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> ranks = Ranks(world_size=4, data_splits=[(0, 2), (1, 2), (0, 2), (1, 2)])
            >>> ranks.by_data_group(["a", "b", "a too", "b too"])
            [['a', 'a too'], ['b', 'b too']]
        """
        return [[gathered[rank] for rank in group] for group in self.data_groups]

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the element-wise reduction over ranks, on every rank; same shape as `tensor`.

        Args:
            tensor: of the same shape and dtype on every rank; it is not changed.
            op: "mean", "sum", "max" or "min"; the mean of integers is a float.
        """
        return tensor

    def all_reduce_ints(
        self, numbers: Sequence[int], op: Literal["sum", "max", "min"]
    ) -> list[int]:
        """Return integers reduced over ranks, on every rank, for decisions on the host.

        It waits for no device where the ranks can communicate over the CPU.

        Args:
            numbers: as many on every rank.
            op: "sum", "max" or "min".

        Example:
            >>> from stratagem.strategies import Ranks
            >>> Ranks().all_reduce_ints([3, -3], "max")
            [3, -3]
        """
        reduced: list[int] = self.all_reduce(torch.tensor(numbers, dtype=torch.long), op).tolist()
        return reduced

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor stacked along a new first dim: (world_size, *tensor.shape).

        Args:
            tensor: of the same shape and dtype on every rank.
            sync_grads: let gradients flow through it.
        """
        return tensor.unsqueeze(0)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data on every rank; safe data: nothing received is executed."""
        return data

    def gather_objects(self, data: Any) -> list[Any]:
        """Return every rank's weights-only-safe data, in the order of ranks, on every rank."""
        return [data]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks, on rank 0; [] on the others.

        For what only rank 0 needs: the others receive nothing, and nothing is decoded. By default
        it is made of `gather_objects`.

        Args:
            data: of about the same length on every rank, since each sends as many as the longest.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> Ranks().gather_bytes(b"a")
            [b'a']
        """
        gathered = self.gather_objects(data)
        return gathered if self.is_global_zero else []

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part of what rank 0 hands out; by default made of `broadcast`.

        Args:
            parts: on rank 0 one for each rank, in their order, of about the same length; on the
                others it is not looked at.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> Ranks().scatter_bytes([b"a"])
            b'a'
        """
        part: bytes = self.broadcast(list(parts))[self.global_rank]
        return part

    def barrier(self, name: str = "") -> None:
        """Wait until every rank is here; `name` stands in the error if one does not come."""

    @final
    @contextmanager
    def rank_zero_first(self, *, local: bool = False) -> Iterator[None]:
        """Let rank 0 run the block before the others do.

        Args:
            local: rank 0 of each node.
        """
        rank = self.local_rank if local else self.global_rank
        if rank > 0:
            self.barrier("rank_zero_first")
        yield
        if rank == 0:
            self.barrier("rank_zero_first")
        self.barrier("rank_zero_first")

    def store(self) -> Any:
        """Return a `torch.distributed` store of the ranks, over a connection of its own.

        For threads beside training, which must not use its collectives.

        Raises:
            ConfigurationError: there is none.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no store by which its ranks could tell each other how a "
            "save in the background goes: save sharded checkpoints synchronously"
        )

    def report_status(self, doing: Callable[[], str]) -> None:
        """Let errors of communication say what a front end is doing ("fit, epoch 0, step 12")."""


def _groups(shards: Sequence[DataSplit], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each part of the data.

    Raises:
        ConfigurationError: a shard is not (index, count), counts differ, or a part has no rank.
    """
    groups: dict[int, list[int]] = {}
    for rank, (index, _) in enumerate(shards):
        groups.setdefault(index, []).append(rank)
    counts = {count for _, count in shards}
    if len(shards) != world_size or counts != {len(groups)} or set(groups) != {*range(len(groups))}:
        listed = ", ".join(f"rank {rank}: {shard}" for rank, shard in enumerate(shards))
        raise ConfigurationError(
            f"data_split is {listed} for {world_size} rank(s); expected (index, count) for each "
            "rank, one count on all of them, and each index from 0 to count - 1 on at least one "
            "rank, so that all of the data is read"
        )
    return tuple(tuple(groups[index]) for index in range(len(groups)))
