"""Who writes which chunk: planned on rank 0 from what every rank holds, kept while that stays.

Chunks are described by numbers, so that rank 0 plans millions of them in a second: it decodes no
description and makes no object for one.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from stratagem.checkpoint import Shards
from stratagem.state import bytes_of
from stratagem.strategies import Ranks

HeldTensors = Mapping[str, Tensor | Shards]
"""By name, whole tensors (alike on every rank) or the chunks that this rank holds."""

Description = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype ("float32") and shape."""


@dataclass(frozen=True)
class Held:
    """The descriptions of one rank's tensors and chunks, without their values.

    Attributes:
        tensors: the descriptions of the tensors, in the order of saving.
        chunks: for each chunk, the number of its tensor, its offsets and its sizes. Every chunk has
            elements.
    """

    tensors: list[Description]
    chunks: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    @staticmethod
    def of(tensors: HeldTensors) -> Held:
        """Return the descriptions of `tensors`.

        Raises:
            ValueError: a chunk has other dims than its tensor; the message names the tensor.
        """
        described: list[Description] = []
        chunks = []
        for number, (name, held) in enumerate(tensors.items()):
            shape = tuple(held.shape)
            described.append((name, str(held.dtype).removeprefix("torch."), shape))
            for offsets, chunk in chunks_of(held):
                if not len(offsets) == chunk.ndim == len(shape):
                    raise ValueError(
                        f"{name!r} has the shape {shape}, but one of its chunks has the offsets "
                        f"{offsets} and the shape {tuple(chunk.shape)}: give a number for each dim"
                    )
                chunks.append((number, offsets, tuple(chunk.shape)))
        return Held(described, chunks)

    @property
    def dims(self) -> int:
        """The largest number of dims of a tensor."""
        return max((len(shape) for *_, shape in self.tensors), default=0)

    def signature(self) -> int:
        """Return a number of 62 bits that differs where the tensors do."""
        return xxhash.xxh3_64_intdigest(json.dumps(self.tensors).encode()) >> 2

    def rows(self, dims: int) -> Tensor:
        """Return the chunks as numbers.

        Args:
            dims: each has as many offsets and sizes; further ones are 0 and 1.

        Returns:
            Shape (chunks, 1 + 2 * dims), int64: the tensor's number, offsets, sizes.
        """
        rows = [
            (number, *offsets, *(0,) * (dims - len(offsets)), *sizes, *(1,) * (dims - len(sizes)))
            for number, offsets, sizes in self.chunks
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 1 + 2 * dims)


def chunks_of(held: Tensor | Shards) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the offsets and values of each chunk that is not empty, in a stable order."""
    chunks = held.chunks if isinstance(held, Shards) else [((0,) * held.ndim, held)]
    return [(tuple(offsets), chunk) for offsets, chunk in chunks if chunk.numel()]


class GlobalPlan:
    """The save plan of all ranks together; on rank 0.

    If several ranks hold a chunk, the lowest of these ranks writes it. Rank 0 therefore writes
    unsharded tensors.

    Args:
        tensors: the descriptions of the tensors of all ranks.
        rows: of each rank, as `Held.rows` returns them, by the numbers of `tensors`.

    Attributes:
        tensors: as given.
        numbers, offsets, sizes: for each chunk, the number of its tensor, shape (chunks,), its
            offsets and its sizes, shape (chunks, dims); sorted by tensor number, then offsets.
        writers: the rank that writes each chunk, shape (chunks,).
        turns: the position of each chunk in the order of writing ranks, shape (chunks,).
        masks: for each rank, a mask of the rows that it writes.
        places: for each rank, the starts and lengths of its chunks in its file, as it reported
            them; shape (2, chunks of that rank).

    Raises:
        ValueError: the chunks of a tensor overlap or do not cover it; the message names the tensor.
    """

    def __init__(self, tensors: Sequence[Description], rows: Sequence[Tensor]) -> None:
        self.tensors = tensors
        counts = torch.tensor([len(of_rank) for of_rank in rows])
        every = torch.cat([*rows])
        dims = every.shape[1] // 2
        shapes = torch.ones(len(tensors), dims, dtype=torch.int64)
        for number, (*_, shape) in enumerate(tensors):
            shapes[number, : len(shape)] = torch.tensor(shape, dtype=torch.int64)
        # Where a chunk begins among the elements of all tensors.
        strides = shapes.flip(1).cumprod(1).flip(1).roll(-1, 1) if dims else shapes
        strides[:, -1:] = 1
        volumes = shapes.prod(1)
        begins = (volumes.cumsum(0) - volumes)[every[:, 0]]
        for dim in range(dims):
            begins += every[:, 1 + dim] * strides[every[:, 0], dim]
        # Stable, so that the lowest rank comes first.
        begins, order = begins.sort(stable=True)
        is_first = torch.ones(len(order), dtype=torch.bool)
        is_first[1:] = begins[1:] != begins[:-1]
        written = order[is_first]
        mask = torch.zeros(len(every), dtype=torch.bool)
        mask[written] = True
        self.masks = mask.tensor_split(counts.cumsum(0)[:-1].tolist())
        kept = every[written]
        self.numbers, self.offsets, self.sizes = kept.tensor_split([1, 1 + dims], 1)
        self.numbers = self.numbers.flatten()
        ranks = torch.arange(len(rows)).repeat_interleave(counts)
        self.writers = ranks[written]
        self.turns = (mask.cumsum(0) - 1)[written]
        self.places: list[Tensor | None] = [None] * len(rows)
        self._check(shapes, volumes)

    def all_places(self) -> Tensor:
        """Return where each chunk lies in its writer's file, shape (2, chunks)."""
        told = [places for places in self.places if places is not None]
        return torch.cat(told, 1)[:, self.turns]

    def _check(self, shapes: Tensor, volumes: Tensor) -> None:
        numbers, ends = self.numbers, self.offsets + self.sizes
        out = ((self.offsets < 0) | (ends > shapes[numbers])).any(1)
        covered = torch.zeros_like(volumes).index_add_(0, numbers, self.sizes.prod(1))
        # The weight of an element is the product of a random number per index, so the weight of a
        # box is the product over its sides. If each element is in one chunk, the weights of the
        # chunks add up to that of the tensor; otherwise they do so by chance less often than once
        # in 2**60 (Schwartz-Zippel lemma).
        of_chunks, of_tensors = torch.ones_like(numbers), torch.ones_like(volumes)
        for dim in range(shapes.shape[1]):
            of_chunks *= _up_to(ends[:, dim], dim) - _up_to(self.offsets[:, dim], dim)
            of_tensors *= _up_to(shapes[:, dim], dim) - _up_to(torch.tensor(0), dim)
        found = torch.zeros_like(volumes).index_add_(0, numbers, of_chunks)
        wrong = found != of_tensors
        wrong[numbers[out]] = True
        if not wrong.any():
            return
        number = int(wrong.nonzero()[0])
        name, _, shape = self.tensors[number]
        if out[numbers == number].any():
            why = "one of its chunks lies outside of it"
        elif covered[number] < volumes[number]:
            why = f"its chunks hold {covered[number]} of its {volumes[number]} elements"
        else:
            why = "its chunks overlap"
        raise ValueError(f"{name!r} has the shape {shape}, and {why}")


def _up_to(positions: Tensor, dim: int) -> Tensor:
    """Return the sum of the random numbers of all indices below `positions`; int64, wrapping."""
    mixed = (positions + (dim + 1) * 0x9E3779B97F4A7) * -0x61C8864680B583EB
    for _ in range(3):
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
    return mixed ^ (mixed >> 32)


@dataclass
class SavePlan:
    """The save plan of one rank; valid for later saves with the same chunks on every rank.

    Attributes:
        held: the tensors and chunks of this rank.
        writes: the indices of the chunks that it writes.
        everyone: on rank 0, the plan of all ranks.
        places: the positions of its chunks in its file at the last save, which rank 0 knows.
    """

    held: Held
    writes: list[int]
    everyone: GlobalPlan | None = None
    places: list[list[int]] | None = field(default=None)


def make_plan(held: Held, ranks: Ranks, *, dims: int, alike: bool) -> SavePlan:
    """Plan a save; on every rank.

    Args:
        held: the tensors and chunks of this rank.
        ranks: the ranks that save together.
        dims: the largest `Held.dims` of any rank.
        alike: whether all ranks have the same tensors; their chunks may differ.

    Raises:
        ValueError: on every rank: see `GlobalPlan`.
    """
    rows = ranks.gather_bytes(bytes_of(held.rows(dims)))
    tensors = [] if alike else ranks.gather_bytes(json.dumps(held.tensors).encode())
    everyone, error = None, ""
    if ranks.is_global_zero:
        try:
            everyone = _plan_for_all(held.tensors, rows, tensors, dims)
        except ValueError as why:
            error = str(why)
    if error := ranks.broadcast(error):
        raise ValueError(error)
    masks = [] if everyone is None else [bytes_of(mask) for mask in everyone.masks]
    own = ranks.scatter_bytes(masks)
    return SavePlan(held, [row for row, is_own in enumerate(own) if is_own], everyone)


def _plan_for_all(
    tensors: list[Description], rows: Sequence[bytes], of_ranks: Sequence[bytes], dims: int
) -> GlobalPlan:
    numbered = [_tensor_of(data).view(-1, 1 + 2 * dims) for data in rows]
    if of_ranks:
        everyone = {name: (name, dtype, shape) for name, dtype, shape in tensors}
        numbers = dict(zip(everyone, range(len(everyone)), strict=True))
        for chunks, encoded in zip(numbered, of_ranks, strict=True):
            for name, dtype, shape in json.loads(encoded):
                everyone.setdefault(name, (name, dtype, tuple(shape)))
                numbers.setdefault(name, len(numbers))
            own = [numbers[name] for name, *_ in json.loads(encoded)]
            chunks[:, 0] = torch.tensor(own, dtype=torch.int64)[chunks[:, 0]]
        tensors = list(everyone.values())
    return GlobalPlan(tensors, numbered)


def _tensor_of(data: bytes) -> Tensor:
    """Return numbers that came as bytes."""
    tensor = torch.empty(len(data) // 8, dtype=torch.int64)
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor
