"""MemoryMeter: the bytes of the tensors that are alive, and what a step communicates."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stratagem_extras.planner.fake_mode import PlanningMode

Kind = Literal["parameters", "gradients", "optimizer", "buffers", "activations", "communication"]

_COLLECTIVES = ("c10d", "_c10d_functional")
_COPIES_OF_COLLECTIVES = ("fsdp",)
"""Operations of FSDP that fill buffers of collectives, and take parameters out of them."""
_FREED_BY_RESIZE = torch.UntypedStorage.resize_


class Peak(NamedTuple):
    """A maximum of memory.

    Attributes:
        size: bytes.
        sizes: bytes of each tensor, by a number.
        scatter, scatter_sizes: the same at the moments when collectives scatter.
    """

    size: int
    sizes: Mapping[int, int]
    scatter: int
    scatter_sizes: Mapping[int, int]


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of real and fake tensors within its context.

    A tensor counts from the first operation that returns it until its memory is freed. Tensors that
    share memory count once. Workspaces of kernels and reserved memory of an allocator are not
    counted.

    Args:
        known: returns the tensors that are parameters, gradients, and so on; called by `start` and
            by `close`.
        with_gloo: count in `scatter_peak` the copy that gloo makes of scattered tensors; for a
            simulated group, which makes no copy.

    Attributes:
        live: bytes of the tensors that are alive.
        peak: the maximum of `live` since `start`.
        parts: bytes at the peak by kind, after `close`: of the tensors that `known` has returned,
            and of the rest the tensors that `note_activations` has recorded, and the tensors that
            collectives read or wrote.
        scatter_peak, scatter_parts: the same at the moments when collectives scatter, with gloo's
            copy; 0 and empty without `with_gloo`.
        sent: bytes that collectives move: for an all-reduce twice its tensor, since it scatters and
            gathers; for other collectives the complete tensor.
        flops: floating-point operations of matrix products, convolutions and attention.
        owner: a name, to which new tensors and operations are attributed.
        kept_by_owner: bytes of activations by their owner; after `note_activations`.
        flops_by_owner: floating-point operations by owner, since `start`; after `note_activations`.

    Example:
        >>> import torch
        >>> from stratagem_extras.planner.meter import MemoryMeter
        >>> with MemoryMeter() as meter:
        ...     a = torch.ones(1000)
        ...     b = a + (a * 2)
        >>> meter.live, meter.peak
        (8000, 12000)
    """

    def __init__(
        self,
        known: Callable[[], Mapping[Kind, Iterable[Tensor]]] = dict[Kind, Iterable[Tensor]],
        *,
        with_gloo: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.with_gloo = known, with_gloo
        self.live = 0
        self.peak = 0
        self.parts: dict[Kind, int] = {}
        self.scatter_peak = 0
        self.scatter_parts: dict[Kind, int] = {}
        self.sent = 0
        self.flops = 0
        self.owner = ""
        self.kept_by_owner: dict[str, int] = {}
        self.flops_by_owner: dict[str, int] = {}
        self._flops: dict[str, int] = {}
        """Since `start`, by owner."""
        self._owners: dict[int, str] = {}
        """The owner of each storage by its number, except for "" as owner."""
        self._numbers: dict[int, int] = {}
        """A number of each storage by its address, which another one may have later."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """To each storage, by its address, until it is freed."""
        self._sizes: dict[int, int] = {}
        """Bytes of each storage, by its number."""
        self._next = itertools.count()
        self._at_peak: dict[int, int] = {}
        """The same at the maximum."""
        self._at_scatter: dict[int, int] = {}
        self._is_rising = False
        self._kinds: dict[int, Kind] = {}
        self._kept: dict[int, Kind] = {}
        self._seen: dict[int, Kind] = {}
        """What else a storage is for, by its number."""
        self._closed: dict[int, Kind] = {}
        """The kind of each storage at the last `close`, by its number."""
        self._resizes = patch.object(torch.UntypedStorage, "resize_", self._resize())
        self._mode: PlanningMode | None = None
        """The mode that calls `note`, faster than a mode of our own would be called."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and each operation would enter Dynamo's guard

    def start(self) -> None:
        """Forget the maximum so far."""
        self.peak, self.scatter_peak = self.live, 0
        self._at_scatter = {}
        self._flops = {}
        self._is_rising = True
        self._kinds = self._known_kinds()

    def note_kept(self) -> None:
        """Count the tensors that are alive, and not known otherwise, as the optimizer's.

        Called between steps: engines keep weights in float32 and buffers for gradients there, and
        parameters that are gathered in a step are sharded.
        """
        known = self._known_kinds()
        self._kept = {n: known.get(n, "optimizer") for n, size in self._sizes.items() if size}

    def note_activations(self) -> None:
        """Count the tensors that are alive, and not known otherwise, as activations.

        Called between forward and backward.
        """
        for number, size in self._sizes.items():
            if size:
                self._seen.setdefault(number, "activations")
        kinds = {**self._seen, **self._kept, **self._kinds, **self._known_kinds()}
        self.kept_by_owner, self.flops_by_owner = {}, self._flops
        for number, size in self._sizes.items():
            if kinds.get(number) == "activations":
                owner = self._owners.get(number, "")
                self.kept_by_owner[owner] = self.kept_by_owner.get(owner, 0) + size

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors, and no longer as kept: the same batch may be trained on again."""
        inputs = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        self.add(inputs)
        for tensor in inputs:
            self._kept.pop(self._numbers.get(storage_of(tensor)._cdata, -1), None)

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before the meter was entered."""
        for tensor in tensors:
            # A meta tensor has no memory; the storage of every fake one says "meta".
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                if type(tensor) is FakeTensor and tensor.fake_mode is not self._mode:
                    continue  # of a strategy that looks for shapes
                self._add(storage_of(tensor))

    def close(self) -> None:
        """Fill in `parts` from the tensors that are known now and were known at `start`."""
        self._note_peak()
        self._closed = {**self._seen, **self._kept, **self._kinds, **self._known_kinds()}
        self.parts = self.parts_of(self._at_peak)
        self.scatter_parts = self.parts_of(self._at_scatter)

    def take_peak(self) -> Peak:
        """Return the maximum since `start`, or since the call before, and begin to seek another."""
        self._note_peak()
        peak = Peak(self.peak, self._at_peak, self.scatter_peak, self._at_scatter)
        self.peak, self.scatter_peak = self.live, 0
        self._at_scatter = {}
        self._is_rising = True
        return peak

    def parts_of(self, sizes: Mapping[int, int]) -> dict[Kind, int]:
        """Return bytes by kind of the tensors of a `Peak`, as they were known at the last `close`.

        Args:
            sizes: bytes by the number of the storage.
        """
        return _by_kind(sizes, self._closed)

    def __enter__(self) -> MemoryMeter:
        """Begin to count."""
        self._resizes.start()
        mode = _get_current_dispatch_mode()
        if isinstance(mode, PlanningMode):
            self._mode, mode.note = mode, self.note
        else:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """End the count."""
        if self._mode is not None:
            self._mode.note = None
            self._mode = None
        else:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._resizes.stop()
        self.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count what an operation has returned."""
        leaves = [result] if isinstance(result, Tensor) else tree_leaves(result)
        self.add(leaves)
        if (count := _count_of(func)) is not None:
            count(self, func, leaves, args, kwargs, result)

    def _count_collective(self, func: Any, leaves: Any, args: Any, *others: Any) -> None:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        # An output that is handed over is as large as the inputs together, or larger.
        size = max((leaf.numel() * leaf.element_size() for leaf in given), default=0)
        self.sent += size * (2 if "allreduce" in func.__name__ else 1)
        self._note_communication([*given, *leaves])
        if (
            self.with_gloo
            and "reduce_scatter" in func.__name__
            and self.live + size > self.scatter_peak
        ):
            copy = next(self._next)
            self._seen[copy] = "communication"
            self.scatter_peak = self.live + size
            self._at_scatter = {**self._sizes, copy: size}

    def _count_copy(self, func: Any, leaves: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._note_communication([*tree_leaves((args, kwargs)), *leaves])

    def _count_flops(self, func: Any, leaves: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        self.flops += count
        self._flops[self.owner] = self._flops.get(self.owner, 0) + count

    def _count_grouped(self, func: Any, leaves: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count a product of groups of rows, which torch's registry does not have."""
        left, right = args[0], args[1]
        # Two operands of rows: each row belongs to a single product.
        groups = result.shape[0] if left.ndim == right.ndim == 2 else 1
        count = 2 * result.numel() // groups * left.shape[-1]
        self.flops += count
        self._flops[self.owner] = self._flops.get(self.owner, 0) + count

    def _note_communication(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                number = self._numbers.get(storage_of(leaf)._cdata)
                if number is not None:
                    self._seen[number] = "communication"

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = next(self._next)
            self._references[address] = weakref.ref(storage, partial(self._free, address))
            if self.owner:
                self._owners[number] = self.owner
        elif self._sizes[number] == size:
            return
        self._change(number, size)

    def _free(self, address: int, _: object) -> None:
        del self._references[address]
        number = self._numbers.pop(address)
        self._change(number, 0)
        del self._sizes[number]
        self._owners.pop(number, None)

    def _known_kinds(self) -> dict[int, Kind]:
        known = self.known()
        addresses = {storage_of(tensor)._cdata: kind for kind in known for tensor in known[kind]}
        return {self._numbers[a]: kind for a, kind in addresses.items() if a in self._numbers}

    def _note_peak(self) -> None:
        if self._is_rising:
            self._is_rising = False
            self._at_peak = dict(self._sizes)

    def _change(self, number: int, size: int) -> None:
        # Called while a tensor is freed: no other one may be looked at.
        before = self._sizes.get(number, 0)
        if size < before:
            self._note_peak()
        self._sizes[number] = size
        self.live += size - before
        if self.live > self.peak:
            self.peak = self.live
            self._is_rising = True

    def _resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """Return what stands in for `UntypedStorage.resize_`, by which FSDP frees parameters."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = _FREED_BY_RESIZE(storage, size)
            self._add(storage)
            return result

        return resize


@cache
def _count_of(func: Any) -> Callable[..., None] | None:
    """Return the method of `MemoryMeter` that takes an operation down, besides its results."""
    if func.namespace in _COLLECTIVES:
        return MemoryMeter._count_collective
    if func.namespace in _COPIES_OF_COLLECTIVES:
        return MemoryMeter._count_copy
    if func.overloadpacket is getattr(torch.ops.aten, "_grouped_mm", None):
        return MemoryMeter._count_grouped
    return MemoryMeter._count_flops if func.overloadpacket in flop_registry else None


def _by_kind(sizes: Mapping[int, int], kinds: Mapping[int, Kind]) -> dict[Kind, int]:
    parts: dict[Kind, int] = {}
    for number, size in sizes.items():
        if kind := kinds.get(number):
            parts[kind] = parts.get(kind, 0) + size
    return parts


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor; of a DTensor, that of this rank's part."""
    if type(tensor) is not FakeTensor:
        tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.untyped_storage()
