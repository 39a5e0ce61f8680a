"""Selective activation checkpointing: operations whose outputs are kept, and do not run again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stratagem.errors import ConfigurationError, UserCodeError

Keep = Literal["matmul"] | Collection[Any] | Callable[[Any], bool] | None
"""Operations whose outputs are kept."""

_OPERATIONS = torch._ops.OpOverload, torch._ops.OpOverloadPacket
# The operations that take longest to compute again; attention comes in one for each kernel.
_MATMUL = re.compile(
    r"aten::(_?(mm|addmm|bmm|baddbmm|linear|grouped_mm|scaled_mm|scaled_grouped_mm|convolution)"
    r"|_scaled_dot_product\w*attention\w*)$"
)


def check_keep(keep: Any) -> None:
    """Check the operations to keep.

    Raises:
        ConfigurationError: they have no accepted form.
    """
    if keep is None or callable(keep) or (isinstance(keep, str) and keep == "matmul"):
        return
    is_listed = isinstance(keep, Collection) and not isinstance(keep, str)
    if not is_listed or not all(isinstance(one, _OPERATIONS) for one in keep):
        raise ConfigurationError(
            f"Recompute(keep={keep!r}): expected 'matmul', operations such as torch.ops.aten.mm, "
            "or a function of an operation that returns a bool"
        )


def keeps(keep: Keep) -> Callable[[Any], bool]:
    """Return a function that tells whether the outputs of an operation are kept."""
    if isinstance(keep, str):
        return _is_matmul
    if callable(keep) and not isinstance(keep, _OPERATIONS):
        return keep
    kept = {keep} if isinstance(keep, _OPERATIONS) else set(keep or ())
    return lambda operation: operation in kept or operation.overloadpacket in kept


@cache
def _is_matmul(operation: Any) -> bool:
    return bool(_MATMUL.match(operation.name().partition(".")[0]))


class KeptOutputs:
    """The outputs of one forward pass that backward does not compute again.

    torch's `create_selective_checkpoint_contexts` keeps the tensor that user code works on. An
    operation in place on a view of this tensor, such as `x @ weight` followed by `x += bias`,
    changes the kept values, and gradients are wrong without an error. Here such an operation first
    makes a copy.

    Args:
        is_kept: whether the outputs of an operation are kept. Operations that draw random numbers
            are never kept: the generator would stay behind, and the next operation would draw
            other numbers than in forward.
    """

    def __init__(self, is_kept: Callable[[Any], bool]) -> None:
        self._is_kept = is_kept
        self.outputs: dict[Any, list[Any]] = {}
        self._storages: set[int] = set()

    def keeps(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the outputs of this call are kept."""
        is_operation = isinstance(operation, torch._ops.OpOverload)
        return is_operation and self._is_kept(operation) and not _draws(operation, args, kwargs)

    def add(self, operation: Any, output: Any) -> None:
        """Keep the outputs of a call."""
        kept = tree_map_only(Tensor, Tensor.detach, output)
        self._storages.update(_storage(tensor) for tensor in _tensors(kept))
        self.outputs.setdefault(operation, []).append(kept)

    def protect(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the outputs that an operation in place is about to change."""
        changed = {_storage(tensor) for tensor in _changed(operation, args, kwargs)}
        if not changed & self._storages:
            return
        self._storages -= changed

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if _storage(tensor) in changed else tensor

        for calls in self.outputs.values():
            calls[:] = [tree_map_only(Tensor, copied, kept) for kept in calls]
        self._storages.update(_storage(tensor) for tensor in _tensors(self.outputs))


class Keeping(TorchDispatchMode):
    """The first forward: keeps outputs."""

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._kept.protect(func, args, kwargs)
        output = func(*args, **kwargs)
        if self._kept.keeps(func, args, kwargs):
            self._kept.add(func, output)
        return output


class Returning(TorchDispatchMode):
    """The forward that runs again: returns the kept outputs."""

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._calls: dict[Any, int] = {}

    def __enter__(self) -> Returning:
        """Begin with the first calls: a second backward pass comes here again."""
        self._calls = {}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._kept.protect(func, args, kwargs)
        if not self._kept.keeps(func, args, kwargs):
            return func(*args, **kwargs)
        call = self._calls.get(func, 0)
        self._calls[func] = call + 1
        calls = self._kept.outputs.get(func, [])
        if call >= len(calls):
            raise UserCodeError(
                f"activation checkpointing: backward ran {func} more often than forward, "
                f"{call + 1} time(s) against {len(calls)}: expected a module that runs the same "
                "operations each time; leave it out of activation_checkpointing"
            )
        return tree_map_only(Tensor, Tensor.detach, calls[call])


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention draws numbers only if it drops some.
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _changed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    if not isinstance(operation, torch._ops.OpOverload) or not operation._schema.is_mutable:
        return
    for position, argument in enumerate(operation._schema.arguments):
        if argument.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
