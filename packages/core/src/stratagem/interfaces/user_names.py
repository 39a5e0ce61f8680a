"""UserNames: what users read of a strategy within a run: its ranks, its device and the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.data.pytree import map_tensors
from stratagem.errors import ConfigurationError
from stratagem.interfaces.prepared_model import PreparedModel, StepModule, user_module
from stratagem.interfaces.ranks import Ranks, ReduceOp

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_OPS: dict[str, ReduceOp] = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "max": "max",
    "min": "min",
}


class Replaceable(Generic[T]):
    """A property that an author's class or object may replace by an attribute of its own."""

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Replaceable[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> Replaceable[T] | T:
        return self if owner is None else self._read(owner)


def for_users(method: Function) -> Function:
    """Mark a method that only users call, so that an author's method may have another signature."""
    method.for_users = True  # type: ignore[attr-defined]
    return method


class UserNames:
    """What users read of a strategy: `self.trainer.strategy.barrier()`.

    Core calls none of these, so a strategy may use the same names for something else.

    Example:
        >>> from stratagem import Trainer
        >>> strategy = Trainer(accelerator="cpu", devices=1, logger=False).strategy
        >>> strategy.world_size, strategy.is_global_zero, strategy.root_device
        (1, True, device(type='cpu'))
    """

    ranks: Ranks
    components: Any
    accelerator: Any

    @Replaceable
    def model(self) -> nn.Module | None:
        """The model of the Trainer's run, in the strategy's wrapper if it has one, such as DDP."""
        prepared = _prepared_of(self)
        if prepared is None:
            return None
        module = prepared.module
        return user_module(module) if isinstance(module, StepModule) else module

    @Replaceable
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the Trainer's run."""
        prepared = _prepared_of(self)
        return [] if prepared is None else prepared.optimizers

    @Replaceable
    def root_device(self) -> torch.device:
        """This rank's device; before the launch, the device that this process will have."""
        found: torch.device | None = vars(self).get("device")
        if found is None:
            found = self.accelerator.device(self.components.devices[self.ranks.local_rank])
        return found

    @Replaceable
    def global_rank(self) -> int:
        """This process's rank among all ranks."""
        return self.ranks.global_rank

    @Replaceable
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.ranks.local_rank

    @Replaceable
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.node_rank

    @Replaceable
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @Replaceable
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_global_zero

    @for_users
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank calls this method."""
        self.ranks.barrier(name or "")

    @for_users
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s weights-only-safe data on every rank."""
        return self.ranks.broadcast(obj, src)

    @for_users
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's tensors; each has the shape (world_size, *shape).

        Args:
            tensor: a tensor, a number, or a nested collection of them.
            group: None, for all ranks.
            sync_grads: make the operation differentiable.
        """
        _check_group(group)
        return map_tensors(
            lambda one: self.ranks.all_gather(one, sync_grads=sync_grads), _tensors(tensor)
        )

    @for_users
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return tensors reduced over ranks, on every rank.

        Args:
            tensor: a tensor, a number, or a nested collection of them.
            group: None, for all ranks.
            reduce_op: "mean", "sum", "max", "min", or a ReduceOp of torch.
        """
        _check_group(group)
        op = _OPS.get(str(reduce_op).rpartition(".")[2].lower())
        if op is None:
            raise ConfigurationError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPS)}")
        return map_tensors(lambda one: self.ranks.all_reduce(one, op), _tensors(tensor))

    if TYPE_CHECKING:
        reduce: Callable[..., Any]  # strategies often have another method of this name
    else:

        @for_users
        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            """Return tensors reduced over ranks; another name of `all_reduce`."""
            return self.all_reduce(tensor, group, reduce_op)

    @for_users
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or with `all=False` any rank, decided True."""
        return bool(self.ranks.all_reduce_ints([int(decision)], "min" if all else "max")[0])


_shown: WeakKeyDictionary[UserNames, ref[PreparedModel]] = WeakKeyDictionary()
"""The model of each strategy's current or last run, which is not a part of the strategy."""


def show(strategy: UserNames, prepared: PreparedModel) -> None:
    """Let `strategy.model` and `strategy.optimizers` be those of a run; the Trainer calls this."""
    _shown[strategy] = ref(prepared)


def _prepared_of(strategy: UserNames) -> PreparedModel | None:
    return _shown[strategy]() if strategy in _shown else None


def _check_group(group: Any) -> None:
    if group is not None:
        raise ConfigurationError(
            f"group={group!r}: expected None, since a strategy's collectives take all ranks; use "
            "torch.distributed for a group of some ranks"
        )


def _tensors(data: Any) -> Any:
    return torch.tensor(data) if isinstance(data, (bool, int, float)) else data
