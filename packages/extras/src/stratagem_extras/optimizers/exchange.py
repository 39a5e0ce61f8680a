"""Whole matrices on the ranks that own them, made of shards, and their updates as shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem.errors import ConfigurationError

BUCKET_BYTES = 64 << 20
"""The limit on the whole matrices of a round, unless every rank has one matrix."""

_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Region:
    """A rectangular part of a matrix, which a rank holds."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of a whole matrix."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))]


def region_of(tensor: Tensor) -> Region:
    """Return the region of this rank's shard."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Region(tuple(offset), tuple(size))


class Exchange:
    """The way of matrices between the ranks that hold shards and the ranks that own them.

    Each matrix has one owner. Owners are chosen so that each rank has about the same work. Matrices
    move in rounds of limited size, so that a rank holds few whole matrices at a time.

    Args:
        parameters: the matrices, or batches of matrices; the same on each rank, in the same order.
        gradients: their gradients, for a comparison of ranks that hold the same parameter.
        group: the ranks.

    Attributes:
        is_local: whether ranks hold different parameters, so that each rank steps its own.

    Raises:
        ConfigurationError: ranks hold shards of different parameters.
    """

    def __init__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        own = [
            (tuple(p.shape), region_of(p), _fingerprint(p, g))
            for p, g in zip(parameters, gradients, strict=True)
        ]
        everyone: list[list[tuple[tuple[int, ...], Region, tuple[float, ...]]]] = [[]] * self.world
        dist.all_gather_object(everyone, own, group=group)
        shards = any(isinstance(p, DTensor) for p in parameters)
        kinds = [[(shape, mark) for shape, _, mark in of_rank] for of_rank in everyone]
        self.is_local = any(kind != kinds[0] for kind in kinds)
        if self.is_local and shards:
            raise ConfigurationError(
                "Muon expected the same matrices on each rank, in one order and with gradients of "
                f"one step, received {[len(kind) for kind in kinds]} matrices, which differ: give "
                "the parameters in the order of the model, or pass distributed=False"
            )
        if self.is_local:
            return
        self.shapes = [shape for shape, _, _ in own]
        self.is_plain = [not isinstance(p, DTensor) for p in parameters]
        self.regions = [[of_rank[i][1] for of_rank in everyone] for i in range(len(own))]
        self.owners = balanced([_work(shape) for shape in self.shapes], self.world)
        self.sources = [self._sources(index) for index in range(len(own))]
        self._difference: Tensor | None = None

    def _sources(self, index: int) -> dict[Region, int]:
        """Return the rank that sends each region of a matrix to its owner."""
        owner, found = self.owners[index], dict[Region, int]()
        for rank, region in enumerate(self.regions[index]):
            if region.numel and (
                region not in found or abs(rank - owner) < abs(found[region] - owner)
            ):
                found[region] = rank
        return found

    def rounds(self, element: int) -> Iterator[list[int]]:
        """Yield the indices of the matrices of each round; `element` is the size of an element."""
        waiting = [
            [index for index, owner in enumerate(self.owners) if owner == rank]
            for rank in range(self.world)
        ]
        share = BUCKET_BYTES // (self.world * element)
        while any(waiting):
            chosen = []
            for of_owner in waiting:
                left = share
                while of_owner and (left == share or left >= math.prod(self.shapes[of_owner[0]])):
                    left -= math.prod(self.shapes[of_owner[0]])
                    chosen.append(of_owner.pop(0))
            yield sorted(chosen)

    def run(
        self,
        indices: Sequence[int],
        shards: dict[int, Tensor],
        update: Callable[[int, Tensor], Tensor],
        dtype: torch.dtype,
    ) -> dict[int, Tensor]:
        """Return this rank's shards of the updates of a round.

        Args:
            indices: the matrices of the round.
            shards: this rank's shard of each of them.
            update: returns the update of a whole matrix; called for the matrices of this rank.
            dtype: the dtype of the messages.
        """
        device = next(iter(shards.values())).device
        arrived = self._to_owners(indices, shards, dtype, device)
        marks = {index: _mark(shards[index]) for index in indices if self.is_plain[index]}
        updates = {index: update(index, whole).to(dtype) for index, whole in arrived.items()}
        return self._to_holders(indices, updates, marks, dtype, device)

    def _to_owners(
        self,
        indices: Sequence[int],
        shards: dict[int, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[int, Tensor]:
        """Return the whole matrices of a round that this rank owns."""
        wholes: dict[int, Tensor] = {}
        sent: list[list[Tensor]] = [[] for _ in range(self.world)]
        expected: list[list[Tensor]] = [[] for _ in range(self.world)]
        for index in indices:
            owner = self.owners[index]
            if owner == self.rank:
                own = shards[index]
                whole = own.new_empty(self.shapes[index], dtype=dtype)
                wholes[index] = whole
            for region, source in self.sources[index].items():
                if owner == self.rank == source:
                    region.of(wholes[index]).copy_(shards[index])
                elif owner == self.rank:
                    expected[source].append(region.of(wholes[index]))
                elif source == self.rank:
                    sent[owner].append(shards[index].to(dtype))
        if any(len(self.sources[index]) > 1 for index in indices) or any(
            self.owners[index] not in self.sources[index].values() for index in indices
        ):
            self._send(sent, expected, device)
        return wholes

    def _to_holders(
        self,
        indices: Sequence[int],
        updates: dict[int, Tensor],
        marks: dict[int, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[int, Tensor]:
        """Return this rank's shards of the updates, which owners send to every rank."""
        sent: list[list[Tensor]] = [[] for _ in range(self.world)]
        expected: list[list[Tensor]] = [[] for _ in range(self.world)]
        shards, theirs = dict[int, Tensor](), dict[int, Tensor]()
        for index in indices:
            owner, regions = self.owners[index], self.regions[index]
            if owner == self.rank:
                shards[index] = regions[owner].of(updates[index])
                for rank in range(self.world):
                    if rank != owner and regions[rank].numel:
                        sent[rank].append(regions[rank].of(updates[index]))
                        if index in marks:
                            sent[rank].append(marks[index])
                continue
            shards[index] = torch.empty(regions[self.rank].size, dtype=dtype, device=device)
            if regions[self.rank].numel:
                expected[owner].append(shards[index])
                if index in marks:
                    theirs[index] = torch.empty(1, device=device)
                    expected[owner].append(theirs[index])
        self._send(sent, expected, device)
        if theirs:
            ours = torch.cat([marks[index] for index in theirs])
            others = torch.cat(list(theirs.values()))
            far = ((ours - others).abs() > _TOLERANCE * (ours.abs() + others.abs())).any()
            self._difference = far if self._difference is None else self._difference | far
        return shards

    def check(self) -> None:
        """Raise if ranks with the same parameter had different gradients in the last step.

        Raises:
            ConfigurationError: they had.
        """
        difference, self._difference = self._difference, None
        if difference is not None and bool(difference):
            raise ConfigurationError(
                "Muon steps each matrix on one rank, and the gradients of the ranks differ: "
                "expected gradients that are averaged over ranks before the step. Pass "
                "distributed=False, so that each rank steps all matrices"
            )

    def _send(
        self,
        sent: list[list[Tensor]],
        expected: list[list[Tensor]],
        device: torch.device,
    ) -> None:
        """Send a list of tensors to each rank, and fill the expected ones, in one all-to-all."""
        bytes_sent = [[_bytes(t) for t in part] for part in sent]
        message = torch.cat([t for part in bytes_sent for t in part] or [_nothing(device)])
        sizes = [sum(t.numel() for t in part) for part in bytes_sent]
        received = [sum(t.numel() * t.element_size() for t in part) for part in expected]
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
        dist.all_to_all_single(arrived, message, received, sizes, group=self.group)
        start = 0
        for tensor in (t for part in expected for t in part):
            end = start + tensor.numel() * tensor.element_size()
            # A copy, since a view of another dtype needs an aligned start.
            tensor.copy_(arrived[start:end].clone().view(tensor.dtype).view(tensor.shape))
            start = end


def balanced(works: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix: the largest first, to the rank with the least work.

    Example:
        >>> balanced([8, 4, 4, 1], 2)
        [0, 1, 1, 0]
    """
    loads, owners = [0.0] * ranks, [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += works[index]
    return owners


def _work(shape: tuple[int, ...]) -> float:
    """Return the multiplications of an orthogonalization, up to a factor."""
    *batch, rows, columns = shape
    return math.prod(batch) * rows * columns * min(rows, columns)


def _fingerprint(parameter: Tensor, gradient: Tensor) -> tuple[float, ...]:
    """Return values that differ if two ranks' plain tensors are different parameters."""
    if isinstance(parameter, DTensor):
        return ()
    return float(parameter.detach().double().sum()), float(gradient.double().sum())


def _mark(update: Tensor) -> Tensor:
    """Return a number of a matrix, by which ranks compare theirs."""
    return update.detach().abs().sum(dtype=torch.float32).reshape(1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)
