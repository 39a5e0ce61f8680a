"""Ranks: the processes that train together, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from stratagem.discovery.former import with_former_names
from stratagem.errors import ConfigurationError

ReduceOp = Literal["mean", "sum", "max", "min"]
DataSplit = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh of ranks: what its ranks read, compute and hold.

    Args:
        name: the name, for messages: "data", "tensor".
        size: the number of ranks along the axis.
        batches: "own": each rank reads batches of its own. "same": the ranks read the same batches
            and compute the same values (tensor parallelism, a pipeline). "parts": the ranks read
            the same batches, and each computes the values of a part of them (context parallelism).
        parameters: "same": parameters that are plain tensors are equal on the ranks, and so are the
            shards of sharded ones that these ranks share. "divided": each rank has other parameters
            (stages of a pipeline, experts); checkpoints hold those of all ranks by their names.
        descends: the first rank has the last place along the axis. Rank 0 of a pipeline can then
            have the last stage, and log its loss.

    Raises:
        ConfigurationError: an argument has another value.

    Example:
        >>> from stratagem.strategies import Axis
        >>> Axis("tensor", 2, batches="same")
        Axis(name='tensor', size=2, batches='same', parameters='same', descends=False)
    """

    name: str
    size: int
    batches: Literal["own", "same", "parts"] = "own"
    parameters: Literal["same", "divided"] = "same"
    descends: bool = False

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ConfigurationError(f"{self}: expected a size of at least 1")
        if self.batches not in ("own", "same", "parts"):
            raise ConfigurationError(f"{self}: expected batches='own', 'same' or 'parts'")
        if self.parameters not in ("same", "divided"):
            raise ConfigurationError(f"{self}: expected parameters='same' or 'divided'")


@with_former_names
class Ranks:
    """The ranks that train together, with this process's place among them and the collectives.

    This class describes a single process: its collectives return their input. A subclass
    communicates. A strategy creates the object in `make_ranks`; the strategy, Lite and the Trainer
    expose it as `ranks`. The rank numbers are valid from `Strategy.bind` on. The collectives work
    once processes are launched, and are called by all ranks alike, in the same order.

    Args:
        global_rank: this process's rank among all ranks.
        local_rank: its rank on its node.
        node_rank: the rank of its node.
        world_size: the number of ranks.
        data_splits: the part of the data that each rank reads, (index, count), in the order of
            ranks. With None, the axes decide; without axes, each rank reads a part of its own.
        axes: the axes of the mesh in which the ranks are arranged. Consecutive ranks lie along the
            last axis. (): the ranks are not arranged.

    Attributes:
        global_rank, local_rank, node_rank, world_size, data_splits, axes: the arguments.
        device: the device of the tensors that collectives return; None before the launch.
        data_groups: the ranks that read each part of the data, in the order of its index. Ranks of
            one group work on the same batches, so the samples of a group are counted once.
        value_groups: the ranks that compute the same values, so that a value that they log is
            counted once: `data_groups`, divided along the axes whose ranks compute parts.
        replica_groups: the ranks whose parameters of one name are the same parameter, and can be
            compared: all ranks, divided along the axes whose ranks hold other parameters.
        members: the ranks of the collectives: all ranks, or the ranks passed to `among`.
        run_split: the part of the training data that all these ranks read together, (index,
            count), if other runs train at the same time (replicas, peers). A strategy sets it in
            `make_ranks`.

    Raises:
        ConfigurationError: the parts of the data do not fit together, or the axes do not contain
            every rank.

    Example:
        >>> from stratagem.strategies import Axis, Ranks
        >>> Ranks().all_gather(torch.ones(2)).shape
        torch.Size([1, 2])
        >>> ranks = Ranks(world_size=4, axes=[Axis("data", 2), Axis("tensor", 2, batches="same")])
        >>> ranks.data_groups, ranks.place([3]), ranks.place([1, 3])
        (((0, 1), (2, 3)), 'data 1, tensor 1', 'tensor 1')
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
        axes: Sequence[Axis] = (),
    ) -> None:
        self.global_rank = global_rank
        self.local_rank = local_rank
        self.node_rank = node_rank
        self.world_size = world_size
        self.device: torch.device | None = None
        self.axes = tuple(axes)
        self._mesh = self.axes or (Axis("rank", world_size),)
        _check_axes(self._mesh, world_size)
        own = self._along("batches", "own")
        self.data_splits = tuple(own if data_splits is None else data_splits)
        self.data_groups = _groups(self.data_splits, world_size)
        parts = self._along("batches", "parts")
        self.value_groups = _by_value([*zip(self.data_splits, parts, strict=True)])
        self.replica_groups = _by_value(self._along("parameters", "divided"))
        self.run_split: DataSplit = (0, 1)
        self.members = tuple(range(world_size))

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def data_split(self) -> DataSplit:
        """This rank's part of the training data, (index, count).

        Ranks of a tensor-parallel group share a part. Samplers for training are divided by it; an
        IterableDataset divides itself by it. With `run_split`, `count` includes the parts of other
        runs.

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
        """This rank's part of the evaluation data, (index, count), without `run_split`."""
        return self.data_splits[self.global_rank]

    @property
    def value_copies(self) -> int:
        """The number of `members` that compute the same values as this rank, itself included."""
        group = next(group for group in self.value_groups if self.global_rank in group)
        return len({*group}.intersection(self.members))

    @final
    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's place along each axis; without axes, the rank alone.

        Example:
            >>> from stratagem.strategies import Axis, Ranks
            >>> Ranks(world_size=6, axes=[Axis("data", 3), Axis("tensor", 2)]).coordinates(3)
            (1, 1)
        """
        indices: list[int] = []
        for axis in reversed(self._mesh):
            rank, index = divmod(rank, axis.size)
            indices.append(axis.size - 1 - index if axis.descends else index)
        return tuple(reversed(indices))

    @final
    def place(self, ranks: Sequence[int]) -> str:
        """Return the coordinates that ranks have in common, for messages: "data 1, tensor 0".

        Axes of one rank are left out. Returns "" if at most one axis has several ranks.
        """
        axes = [(i, axis) for i, axis in enumerate(self._mesh) if axis.size > 1]
        if len(axes) < 2:
            return ""
        coordinates = [self.coordinates(rank) for rank in ranks]
        common = [(axis.name, {of_rank[i] for of_rank in coordinates}) for i, axis in axes]
        return ", ".join(f"{name} {min(found)}" for name, found in common if len(found) == 1)

    @final
    def seed(self, seed: int, *, differs_along: Sequence[str] | None = None) -> int:
        """Return a seed that is equal for ranks at the same place along some axes, else different.

        For a generator of random numbers: ranks that draw the same numbers compute the same. The
        seeds of all axes' first ranks equal `seed`.

        Args:
            seed: the seed of the run, from 0 to 2**32 - 1.
            differs_along: the names of the axes. With None, the seeds differ between value groups,
                so that ranks that compute the same values have the same seed.

        Raises:
            ConfigurationError: there is no axis of a name.

        Example:
            >>> from stratagem.strategies import Axis, Ranks
            >>> axes = [Axis("data", 2), Axis("tensor", 2, batches="same")]
            >>> ranks = [Ranks(global_rank=rank, world_size=4, axes=axes) for rank in range(4)]
            >>> [each.seed(7) for each in ranks]  # of dropout on whole activations
            [7, 7, 2000013, 2000013]
            >>> [each.seed(7, differs_along=["tensor"]) for each in ranks]  # of a weight's shards
            [7, 1000010, 7, 1000010]
        """
        groups = self.value_groups
        if differs_along is not None:
            if unknown := {*differs_along}.difference(axis.name for axis in self._mesh):
                raise ConfigurationError(
                    f"seed(differs_along={differs_along!r}): there is no axis {min(unknown)!r}; "
                    f"expected some of {', '.join(axis.name for axis in self._mesh)}"
                )
            groups = _by_value(self._along("name", *differs_along))
        first = next(group[0] for group in groups if self.global_rank in group)
        return (seed + first * 1_000_003) % 2**32

    def _along(self, field: str, *values: str) -> list[tuple[int, int]]:
        """Return each rank's index along all axes with such a value, and the size of these axes."""
        indices, count, stride = [0] * self.world_size, 1, self.world_size
        for axis in self._mesh:
            stride //= axis.size
            if getattr(axis, field) in values:
                count *= axis.size
                indices = [i * axis.size + r // stride % axis.size for r, i in enumerate(indices)]
        return [(index, count) for index in indices]

    @final
    def by_data_group(self, gathered: Sequence[T]) -> list[list[T]]:
        """Return gathered items grouped by the part of the data that their ranks share.

        Args:
            gathered: an item for each rank, in the order of ranks, as `gather_objects` returns
                them.

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
            tensor: a tensor of the same shape and dtype on every rank; not modified.
            op: "mean", "sum", "max" or "min"; the mean of integers is a float.
        """
        return tensor

    def all_reduce_ints(
        self, numbers: Sequence[int], op: Literal["sum", "max", "min"]
    ) -> list[int]:
        """Return integers reduced over ranks, on every rank, for decisions on the host.

        If the ranks can communicate over the CPU, no device is synchronized.

        Args:
            numbers: integers, the same number of them on every rank.
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
            tensor: a tensor of the same shape and dtype on every rank.
            sync_grads: make the operation differentiable.
        """
        return tensor.unsqueeze(0)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return the data of rank `src` on every rank; weights-only-safe data, never executed.

        Raises:
            TypeError: on every rank, if the data are not weights-only-safe.
        """
        return data

    def gather_objects(self, data: Any) -> list[Any]:
        """Return every rank's weights-only-safe data, in the order of ranks, on every rank.

        Raises:
            TypeError: on every rank, if one rank's data are not weights-only-safe.
        """
        return [data]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks, on rank 0; [] on the others.

        For data that only rank 0 needs: the other ranks receive no data, and no data is decoded.
        By default this calls `gather_objects`.

        Args:
            data: bytes of similar length on every rank, since shorter ones are padded to the
                longest.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> Ranks().gather_bytes(b"a")
            [b'a']
        """
        gathered = self.gather_objects(data)
        return gathered if self.is_global_zero else []

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part of the bytes that rank 0 scatters; by default with `broadcast`.

        Args:
            parts: on rank 0, one part for each rank, in the order of ranks, of similar length. The
                other ranks' value is ignored.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> Ranks().scatter_bytes([b"a"])
            b'a'
        """
        part: bytes = self.broadcast(list(parts))[self.global_rank]
        return part

    def barrier(self, name: str = "") -> None:
        """Wait until every rank calls this; the error names `name` if a rank does not."""

    def end_together(self, did: str) -> None:
        """Wait until every rank calls this, or raise if another waits in a collective instead.

        Args:
            did: the last action of this rank, for the error.

        Raises:
            CommunicationError: names the ranks that wait, and where.
        """

    def meet(self, did: str, *, failed: bool = False) -> None:
        """Wait until every rank calls this, or raise within seconds if all others are stuck.

        Ranks that run out of batches in an evaluation call this while other ranks run their last
        steps. A rank that still runs code is waited for without a limit.

        Args:
            did: the last action of this rank, for the error.
            failed: this rank raises an error instead: tell the others, and do not wait.

        Raises:
            CommunicationError: all ranks that have not called this wait in a collective, or a rank
                among them has failed.
        """

    def connect(self, members: Sequence[int]) -> None:
        """Make the connections for `among(members)`; called on every rank before it, once.

        Raises:
            ConfigurationError: the ranks cannot communicate without each other.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no collectives among a part of its ranks, and only rank(s) "
            f"{', '.join(map(str, members))} of {self.world_size} have a batch left: override "
            "connect(members), and let collectives run among self.members"
        )

    @contextmanager
    def among(self, members: Sequence[int]) -> Iterator[None]:
        """Run the collectives of this context among these ranks, which alone enter it.

        In an evaluation, the ranks that still have a batch run their steps in it. A gathered tensor
        then has a row for each of them.

        Args:
            members: some ranks, in ascending order, after `connect(members)`.

        Example:
            >>> from stratagem.strategies import Ranks
            >>> ranks = Ranks(world_size=2)
            >>> with ranks.among((0,)):
            ...     print(ranks.members)
            (0,)
            >>> ranks.members
            (0, 1)
        """
        before, self.members = self.members, tuple(members)
        try:
            yield
        finally:
            self.members = before

    @final
    @contextmanager
    def rank_zero_first(self, *, local: bool = False) -> Iterator[None]:
        """Let rank 0 run the block before the others do.

        Args:
            local: let local rank 0 of each node run first, instead of global rank 0.
        """
        rank = self.local_rank if local else self.global_rank
        if rank > 0:
            self.barrier("rank_zero_first")
        yield
        if rank == 0:
            self.barrier("rank_zero_first")
        self.barrier("rank_zero_first")

    def store(self) -> Any:
        """Return a `torch.distributed` store that all ranks share, with its own connection.

        For background threads, which must not use the collectives of training.

        Raises:
            ConfigurationError: the ranks have no store.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no store by which its ranks could tell each other how a "
            "save in the background goes: save sharded checkpoints synchronously"
        )

    def report_status(self, doing: Callable[[], str]) -> None:
        """Set a function that describes this rank's activity for communication errors.

        Args:
            doing: returns a description such as "fit, epoch 0, step 12".
        """


def _check_axes(axes: Sequence[Axis], world_size: int) -> None:
    """Raise an error if the axes do not contain every rank once."""
    if (count := prod(axis.size for axis in axes)) != world_size:
        sizes = " x ".join(f"{axis.name} {axis.size}" for axis in axes)
        raise ConfigurationError(
            f"the axes {sizes} are for {count} rank(s), received {world_size}: expected sizes "
            "whose product is the number of ranks"
        )


def _by_value(of_ranks: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each value, in ascending order of the values."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(of_ranks):
        groups.setdefault(value, []).append(rank)
    return tuple(tuple(groups[value]) for value in sorted(groups))


def _groups(shards: Sequence[DataSplit], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each part of the data.

    Raises:
        ConfigurationError: a shard is not (index, count), counts differ, or a part has no rank.
    """
    indices, counts = [index for index, _ in shards], {count for _, count in shards}
    groups = _by_value(indices)
    is_split = counts == {len(groups)} and {*indices} == {*range(len(groups))}
    if len(shards) != world_size or not is_split:
        listed = ", ".join(f"rank {rank}: {shard}" for rank, shard in enumerate(shards))
        raise ConfigurationError(
            f"data_split is {listed} for {world_size} rank(s); expected (index, count) for each "
            "rank, one count on all of them, and each index from 0 to count - 1 on at least one "
            "rank, so that all of the data is read"
        )
    return groups
