"""Snapshots: copies of a checkpoint's state in host memory, which training no longer changes."""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict, defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import Shards

# `copy_` is slower: its threads wait for one another. With other processes on the cores, 1.2 GB
# took it 1.25 s, and memmove 0.10 s, as on an idle machine. ctypes releases the interpreter's lock.
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p

_LEAVES = (type(None), bool, int, float, complex, str, bytes)


class Snapshots:
    """Copies checkpoints into host memory, each into the memory of the one before.

    A snapshot is valid until the next one is taken. New memory costs more than the copy, since the
    kernel has to clear each page first; so the last snapshot's memory is used again where sizes are
    the same, and freed where they are not.

    Example:
        >>> import torch
        >>> weights = torch.ones(3)
        >>> snapshot = Snapshots().take({"weights": weights, "tied": weights[:2]})
        >>> weights.zero_()
        tensor([0., 0., 0.])
        >>> snapshot
        {'weights': tensor([1., 1., 1.]), 'tied': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, bool], list[Tensor]] = {}

    def take(self, checkpoint: dict[str, Any], *, pin_memory: bool = False) -> dict[str, Any]:
        """Return a complete copy of safe data and of its `Shards`.

        Args:
            checkpoint: weights-only-safe data; its tensors may lie on a device.
            pin_memory: copy tensors on a device into page-locked memory.
        """
        taking = _Taking(self._memory, pin_memory=pin_memory)
        copied: dict[str, Any] = taking.copy(checkpoint)
        taking.finish()
        self._memory = taking.used
        return copied

    def forget(self) -> None:
        """Free the memory of the last snapshot, once that is not in use any more."""
        self._memory = {}


class _Taking:
    """The state of a snapshot in progress.

    Tensors that share storage share it in the copy, and repeated references to an object remain
    references to one object. A file of the copy therefore has the same bytes as a file of the
    original.

    Args:
        memory: byte tensors that can be reused, by (number of bytes, pinned).
        pin_memory: see `Snapshots.take`.
    """

    def __init__(self, memory: dict[tuple[int, bool], list[Tensor]], *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self.used: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._memory = {size: list(tensors) for size, tensors in memory.items()}
        self._copies: dict[int, Any] = {}
        self._storages: dict[int, Tensor] = {}
        # Keep objects alive while their id() is a key: another object might get the same id.
        self._alive: list[Any] = []
        self._devices: set[torch.device] = set()

    def copy(self, data: Any) -> Any:
        kind = type(data)
        if kind in _LEAVES:
            return data
        if id(data) in self._copies:
            return self._copies[id(data)]
        copied: Any
        if isinstance(data, Tensor):
            copied = self._tensor(data)
        elif isinstance(data, Shards):
            copied = data.map(self._chunk)
        elif kind in (dict, OrderedDict, Counter):
            copied = kind()
            for key, value in data.items():
                copied[key] = self.copy(value)
            if kind is not dict:
                vars(copied).update(deepcopy(vars(data)))  # a module's state has versions there
        elif kind in (list, tuple, set):
            copied = kind([self.copy(value) for value in data])
        else:
            copied = deepcopy(data)
        self._copies[id(data)] = copied
        self._alive.append(data)
        return copied

    def finish(self) -> None:
        """Wait for copies from devices that are still under way."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not self._has_plain_memory(tensor):
            return tensor.detach().to("cpu", copy=True)
        memory = self._storage_copy(tensor)
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _storage_copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(storage, 0, (storage.nbytes(),), (1,))
            self._storages[storage._cdata] = self._copy_of(whole)
            self._alive.append(storage)
        return self._storages[storage._cdata]

    def _chunk(self, chunk: Tensor) -> Tensor:
        """Copy only the chunk, which may be a view into a larger storage."""
        if not self._has_plain_memory(chunk):
            return chunk.detach().to("cpu", copy=True)
        chunk = chunk.detach().contiguous()
        return self._copy_of(chunk.view(-1).view(torch.uint8)).view(chunk.dtype).view(chunk.shape)

    def _copy_of(self, whole: Tensor) -> Tensor:
        """Return a copy of a tensor of bytes."""
        on_host = whole.device.type == "cpu"
        pinned = self._pin_memory and not on_host
        size = whole.numel(), pinned
        there = self._memory.get(size)
        memory = (
            there.pop() if there else torch.empty(size[0], dtype=torch.uint8, pin_memory=pinned)
        )
        self.used[size].append(memory)
        if pinned:
            memory.copy_(whole, non_blocking=True)
            self._devices.add(whole.device)
        elif not on_host:
            memory.copy_(whole)
        else:
            _memmove(memory.data_ptr(), whole.data_ptr(), whole.numel())
        return memory

    def _has_plain_memory(self, tensor: Tensor) -> bool:
        """Whether its elements lie in its storage as they are, which can be copied as bytes."""
        accelerator = torch.accelerator.current_accelerator()
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and (
                tensor.device.type == "cpu"
                or (accelerator is not None and tensor.device.type == accelerator.type)
            )
        )
