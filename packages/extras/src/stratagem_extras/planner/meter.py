"""MemoryMeter: the bytes of the tensors that are alive, and what a step communicates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["parameters", "gradients", "optimizer", "buffers"]

_COLLECTIVES = ("c10d", "_c10d_functional")
_FREED_BY_RESIZE = torch.UntypedStorage.resize_


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors while it is entered, of fake ones as of real ones.

    A tensor counts from the first operation that returns it until its memory is freed. Tensors that
    share memory count once. What kernels use for themselves, and what an allocator keeps in
    reserve, is not counted.

    Args:
        known: returns the tensors that are parameters, gradients, and so on. It is called whenever
            the sum has reached a new maximum.

    Attributes:
        live: bytes of the tensors that are alive.
        peak: the maximum of `live` since `start`.
        parts: what `known` returned at the peak, in bytes of each kind.
        sent: bytes that collectives move: of an all-reduce twice its tensor, since it scatters and
            gathers; of the others the whole tensor.

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
        self, known: Callable[[], Mapping[Kind, Iterable[Tensor]]] = dict[Kind, Iterable[Tensor]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.live = 0
        self.peak = 0
        self.parts: dict[Kind, int] = {}
        self.sent = 0
        self._sizes: dict[int, int] = {}
        """Bytes of each storage, by its address."""
        self._is_rising = False
        self._resizes = patch.object(torch.UntypedStorage, "resize_", self._resize())

    def start(self) -> None:
        """Forget the maximum so far."""
        self.peak = self.live
        self._is_rising = True

    def count(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the memory of tensors, each memory once."""
        storages = {storage._cdata: storage for storage in map(_storage, tensors)}
        return sum(storage.nbytes() for storage in storages.values())

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before the meter was entered."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._add(_storage(tensor))

    def close(self) -> None:
        """Take down the parts of the last maximum, where `live` has not fallen since."""
        if self._is_rising:
            self._is_rising = False
            self.parts = {kind: self.count(held) for kind, held in self.known().items()}

    def __enter__(self) -> MemoryMeter:
        """Begin to count."""
        self._resizes.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """End the count."""
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
        if func.namespace in _COLLECTIVES:
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            # An output that is handed over is as large as the inputs together, or larger.
            size = max((leaf.numel() * leaf.element_size() for leaf in given), default=0)
            self.sent += size * (2 if "allreduce" in func.__name__ else 1)
        self.add(tree_leaves(result))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(key)
        if before == size:
            return
        if before is None:
            weakref.finalize(storage, self._free, key)
        self._sizes[key] = size
        self._change(size - (before or 0))

    def _free(self, key: int) -> None:
        self._change(-self._sizes.pop(key))

    def _change(self, size: int) -> None:
        if size < 0 and self._is_rising:
            self.close()
        self.live += size
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


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()
