"""Samples of all ranks in one place, each once; and tensors of different sizes made alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stratagem.data import map_items, map_tensors
from stratagem.errors import UserCodeError
from stratagem.strategies import Ranks


def gather_for_metrics(
    ranks: Ranks, data: Any, samples: tuple[int, int, bool], *, is_repeated: bool
) -> Any:
    """Return the samples of all ranks, without repeated ones; see `Lite.gather_for_metrics`.

    Args:
        ranks: all of them make the call.
        data: tensors with samples in the first dimension, lists of objects, or nested collections
            of them.
        samples: the number of samples that this rank has read, the number of these samples that
            another rank has read too, and whether they belong to the current batch.
        is_repeated: whether this rank repeats its last batch, so that its samples do not count.

    Raises:
        UserCodeError: the ranks' data differ in structure or in shape, or the indices of repeated
            samples are unknown.
    """
    if ranks.world_size == 1:
        return data
    size, repeated, within = samples
    repeated = -1 if is_repeated else repeated
    described: list[Any] = []
    problem = ""
    try:
        _map(data, lambda t: described.append([*t.shape]), lambda r: described.append((*r,)))
    except UserCodeError as error:
        problem = f"rank {ranks.global_rank}: {error}"
    everyone = ranks.gather_objects([size, repeated, within, problem or described])
    # A rank that raised before the exchange would leave the others waiting.
    for *_, found in everyone:
        if isinstance(found, str):
            raise UserCodeError(found)
    # Ranks that compute the same values count once; ranks that compute parts of them count each.
    firsts = [group[0] for group in ranks.value_groups]
    groups = [everyone[rank] for rank in firsts]
    if len({len(leaves) for *_, leaves in groups}) > 1:
        raise UserCodeError(
            "gather_for_metrics() received different numbers of tensors and lists on the ranks: "
            f"{[len(leaves) for *_, leaves in groups]}; expected the same structure on each"
        )
    leaves = iter([[of_rank[-1][n] for of_rank in groups] for n in range(len(described))])

    def tensor(own: Tensor) -> Tensor:
        shapes = next(leaves)
        if len({tuple(shape[1:]) for shape in shapes}) > 1 or len({*map(len, shapes)}) > 1:
            raise UserCodeError(
                f"gather_for_metrics() received tensors of the shapes {shapes} on the ranks; "
                "expected one shape but for the first dimension: call pad_across_processes(data, "
                "dim=1) before it"
            )
        own = own if own.ndim else own.reshape(1)
        counts = [shape[0] if shape else 1 for shape in shapes]
        padded = _pad(own, 0, max(counts), 0, False)
        gathered = ranks.all_gather(padded)
        kept, order = _kept(groups, counts, is_scalar=not shapes[0])
        rows = [gathered[rank][:count] for rank, count in zip(firsts, kept, strict=True)]
        return torch.cat(rows)[torch.tensor(order, dtype=torch.long, device=own.device)]

    def objects(own: Sequence[Any]) -> list[Any]:
        parts = next(leaves)
        kept, order = _kept(groups, [len(part) for part in parts])
        rows = [row for part, count in zip(parts, kept, strict=True) for row in part[:count]]
        return [rows[place] for place in order]

    return _map(data, tensor, objects)


def _kept(
    groups: Sequence[Any], counts: Sequence[int], *, is_scalar: bool = False
) -> tuple[list[int], list[int]]:
    """Return the number of samples of each rank that count, and their order in the data.

    Raises:
        UserCodeError: some samples are repeated, and their indices are unknown.
    """
    is_dealt = all(count == size for count, (size, *_) in zip(counts, groups, strict=True))
    kept = []
    for count, (size, repeated, within, _) in zip(counts, groups, strict=True):
        if repeated > 0 and within and not is_scalar and not is_dealt:
            raise UserCodeError(
                f"gather_for_metrics() received {list(counts)} rows on the ranks, whose last batch "
                f"has {size} samples, of which {repeated} is repeated: expected a row for each "
                "sample. all_gather(), or all_reduce(), takes what is not counted by sample"
            )
        kept.append(0 if repeated < 0 else count - repeated * (is_dealt and not is_scalar))
    starts = [0, *accumulate(kept)]
    pairs = [(place, rank) for rank, count in enumerate(kept) for place in range(count)]
    if is_dealt and not is_scalar:
        pairs.sort()  # ranks take samples in turn
    return kept, [starts[rank] + place for place, rank in pairs]


def _map(
    data: Any, tensor: Callable[[Tensor], Any], objects: Callable[[Sequence[Any]], Any]
) -> Any:
    """Return `data` with functions applied to its tensors, and to its lists without tensors."""
    if isinstance(data, Tensor):
        return tensor(data)
    found: list[Tensor] = []
    map_tensors(found.append, data)
    if not found and isinstance(data, (list, tuple)):
        return objects(data)
    mapped = map_items(lambda item: _map(item, tensor, objects), data)
    if mapped is data:
        raise UserCodeError(
            f"gather_for_metrics() received a {type(data).__name__}; expected tensors, lists of "
            "objects, and dicts, lists and tuples of them"
        )
    return mapped


def pad_across_processes(ranks: Ranks, data: Any, dim: int, value: float, first: bool) -> Any:
    """Return tensors as long as the longest of all ranks; see `Lite.pad_across_processes`."""

    def padded(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        (longest,) = ranks.all_reduce_ints([tensor.shape[dim]], "max")
        return _pad(tensor, dim, longest, value, first)

    return map_tensors(padded, data)


def _pad(tensor: Tensor, dim: int, length: int, value: float, first: bool) -> Tensor:
    missing = length - tensor.shape[dim]
    sides = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim)
    return pad(tensor, [*sides, *((missing, 0) if first else (0, missing))], value=value)


def split_between_processes(ranks: Ranks, data: Any, padding: bool) -> Any:
    """Return this rank's part of data; see `Lite.split_between_processes`.

    Raises:
        UserCodeError: the entries of a dict have different lengths.
    """
    if isinstance(data, Mapping):
        if len({len(value) for value in data.values()}) > 1:
            lengths = {key: len(value) for key, value in data.items()}
            raise UserCodeError(
                f"split_between_processes() received a dict with entries of the lengths {lengths}; "
                "expected one length"
            )
        return {key: split_between_processes(ranks, value, padding) for key, value in data.items()}
    index, count = ranks.eval_split
    fewest, more = divmod(len(data), count)
    begin = index * fewest + min(index, more)
    part = data[begin : begin + fewest + (index < more)]
    missing = fewest + bool(more) - len(part)
    if not padding or not missing:
        return part
    if isinstance(part, Tensor):
        return torch.cat([part, data[-1:].repeat(missing, *[1] * (data.ndim - 1))])
    return part + data[-1:] * missing
