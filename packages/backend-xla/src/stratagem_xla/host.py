"""Tensors of XLA devices, copied between them and the host together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.data import map_tensors
from stratagem_xla.library import import_torch_xla


def on_host(data: Any) -> Any:
    """Return nested data with its XLA tensors whole in host memory.

    What is one tensor stays one, so that a file of it holds tied weights once.
    """
    there = _xla_tensors(data)
    copies = dict(zip(there, _copied([one.detach() for one in there.values()]), strict=True))
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor.detach()), data)


def put_on_device(data: Any) -> None:
    """Finish copies into XLA tensors now, not in the first step's program.

    That program would be another one than that of the steps after it, whose results differ in the
    last bit. No number of the device's RNG is used up, as by `torch_xla.sync()`.
    """
    import_torch_xla()._XLAC._xla_sync_multi(list(_xla_tensors(data).values()), [], True, True)


def _xla_tensors(data: Any) -> dict[int, Tensor]:
    """Return the XLA tensors in nested data, by their id."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla":
            found[id(tensor)] = tensor
        return tensor

    map_tensors(note, data)
    return found


def _copied(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor's copy on the host.

    A divided one is put together from its parts: torch_xla would compile a program for each to
    gather it, each time anew.
    """
    library = import_torch_xla()._XLAC
    is_divided = [library._get_xla_sharding_spec(one).startswith("{devices=") for one in tensors]
    divided = [one for one, yes in zip(tensors, is_divided, strict=True) if yes]
    whole = [one for one, yes in zip(tensors, is_divided, strict=True) if not yes]
    parts = zip(
        library._get_local_shards(divided),
        library._get_local_shard_replica_and_indices(divided),
        strict=True,
    )
    copies = iter(library._xla_get_cpu_tensors(whole))
    for tensor, yes in zip(tensors, is_divided, strict=True):
        yield _put_together(tensor, *next(parts)) if yes else next(copies)


def _put_together(tensor: Tensor, shards: Sequence[Any], places: Sequence[Any]) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, place) in zip(shards, places, strict=True):
        place = tuple(place)
        target = whole[place]
        # The last shards are padded where the number of devices does not divide the dim.
        whole[place] = shard[tuple(slice(size) for size in target.shape)]
    return whole
