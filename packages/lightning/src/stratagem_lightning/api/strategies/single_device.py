"""Fabric's strategies, with what code calls on one that no Fabric has taken yet."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem import strategies
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.data import move_to_device
from stratagem.errors import ConfigurationError
from stratagem.lite import LiteModule, collect, restore
from stratagem.precision import TruePrecision
from stratagem.runtime import SkippedInit
from stratagem.strategies import Ranks
from stratagem.trainer import Trainer

# Importing this module gives `strategy.accelerator` the methods of Lightning's.
from stratagem_lightning.api.accelerators import accelerator as accelerator
from stratagem_lightning.api.instance_check import InstanceCheck, of_class
from stratagem_lightning.api.strategies.called import call_in_setup
from stratagem_lightning.api.strategies.filtering import Filter, filtered
from stratagem_lightning.api.utilities.exceptions import UserRuntimeError, UserTypeError

PathLike = str | os.PathLike[str]


_trainers: WeakKeyDictionary[strategies.Strategy, ref[Any]] = WeakKeyDictionary()


def belongs_to(strategy: strategies.Strategy, trainer: Any) -> None:
    """Tell a strategy its Trainer, which has the model and optimizers that users ask it for.

    The strategy's overrides of Lightning's methods are called from now on.
    """
    _trainers[strategy] = ref(trainer)
    call_in_setup(strategy)


def trainer_of(strategy: strategies.Strategy) -> Any:
    """Return the Trainer of a strategy.

    None: it has no Trainer.
    """
    return _trainers.get(strategy, lambda: None)()


def _to_device(trainer: Any) -> Callable[..., Any]:
    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return move_to_device(batch, device or trainer.strategy.root_device)

    return batch_to_device


def _save(strategy: Any, checkpoint: Any, filepath: PathLike, storage_options: Any = None) -> None:
    """Write a checkpoint on rank 0: `save_checkpoint` of a Trainer's strategy."""
    if storage_options is not None:
        raise UserTypeError(
            f"`{type(strategy).__name__}.save_checkpoint(..., storage_options=...)` is not "
            "supported: give them to a CheckpointIO of your own"
        )
    if strategy.ranks.is_global_zero:
        strategy.checkpoint_io.save_checkpoint(checkpoint, filepath)


class _SetUpAgain(NamedTuple):
    """`strategy.setup_optimizers`, which is the same each time that it is asked for."""

    trainer: Any

    def __call__(self, trainer: Any) -> None:
        """Give the optimizers what `configure_optimizers` returns now, within a fit on one device.

        For a model whose parameters are others than before. Optimizers start from anew.
        """
        run = trainer.latest_run
        if run is None or not isinstance(trainer.strategy, strategies.SingleDeviceStrategy):
            raise ConfigurationError(
                "strategy.setup_optimizers() works within a fit on one device, received "
                f"{type(trainer.strategy).__name__}: parameters must stay the same there"
            )
        for own, fresh in zip(run.prepared.optimizers, run.make_optimizers(), strict=True):
            if type(own) is not type(fresh):
                raise ConfigurationError(
                    f"configure_optimizers() returned a {type(fresh).__name__} in the place of a "
                    f"{type(own).__name__}: expected optimizers of the same classes as before"
                )
            # The loop keeps its objects. Schedulers of the new ones change the same groups.
            own.param_groups, own.state = fresh.param_groups, fresh.state


_OF_TRAINER: dict[str, Callable[[Any], Any]] = {
    "lightning_module": lambda trainer: trainer.lightning_module,
    "_lightning_module": lambda trainer: trainer.lightning_module,
    "lr_scheduler_configs": lambda trainer: trainer.lr_scheduler_configs,
    "setup_optimizers": _SetUpAgain,
    "launcher": lambda trainer: trainer.plan.launcher,
    "batch_to_device": _to_device,
    "remove_checkpoint": lambda trainer: trainer.strategy.checkpoint_io.remove_checkpoint,
}
"""What a strategy of Lightning's has of its Trainer."""


def _find_lightning_name(strategy: Any, name: str) -> Any:
    """Return what Lightning's users ask any strategy for."""
    trainer = trainer_of(strategy) if name in _OF_TRAINER else None
    if isinstance(trainer, Trainer):
        return _OF_TRAINER[name](trainer)
    if name == "save_checkpoint":
        return partial(_save, strategy)
    if name == "device_mesh" and isinstance(strategy, strategies.ModelParallelStrategy):
        raise UserRuntimeError(
            "Accessing the device mesh before processes have initialized is not allowed: read it "
            "from configure_model() on"
        )
    return _find_or_explain(strategy, name)


# For the strategies of every distribution, once Lightning's names are in use.
_find_or_explain = strategies.Strategy.__getattr__  # type: ignore[attr-defined]
strategies.Strategy.__getattr__ = _find_lightning_name  # type: ignore[attr-defined]

_ALONE = {"ranks": Ranks, "checkpoint_io": SingleFileCheckpointIO, "precision": TruePrecision}
"""What is there before a Fabric brings its own, unless something else was asked for."""


class SingleDeviceStrategy(strategies.SingleDeviceStrategy, metaclass=InstanceCheck):
    """One device; as `stratagem.strategies.SingleDeviceStrategy`, and of use without a Fabric.

    Args:
        device: as there; None: the CPU, until a Fabric says otherwise.
        accelerator, checkpoint_io: as for every strategy.
        precision, precision_plugin: both names of one argument.
        **components: see `stratagem.strategies.Strategy`.

    Example:
        >>> import torch
        >>> strategy = SingleDeviceStrategy("cpu")
        >>> model = strategy.setup_module(torch.nn.Linear(2, 1))
        >>> strategy.root_device, strategy.world_size, list(strategy.get_module_state_dict(model))
        (device(type='cpu'), 1, ['weight', 'bias'])
    """

    is_instance = of_class(strategies.SingleDeviceStrategy)

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        *,
        precision_plugin: Any = None,
        **components: Any,
    ) -> None:
        super().__init__(
            device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision if precision_plugin is None else precision_plugin,
            **components,
        )

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if "components" not in own and "requested" in own:
            if name in ("device", "root_device"):
                return self._wanted or torch.device("cpu")
            if name in _ALONE and not isinstance(asked := self.requested.get(name), str):
                own[name] = _ALONE[name]() if asked is None else asked
                return own[name]
        return _find_lightning_name(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it; a component that is set before a Fabric has taken this one is asked for."""
        components = ("accelerator", "precision", "checkpoint_io", "cluster_environment")
        if name in components and "components" not in vars(self):
            self.requested = {**self.requested, name: value}
        super().__setattr__(name, value)

    # -- models and tensors

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module: one device needs no wrapper."""
        return module

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device."""
        module.to(self.root_device)

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which to build a model: on the device, of the right dtype.

        Args:
            empty_init: whether to leave first values out, for weights that are loaded next.
        """
        with self.tensor_init_context(), SkippedInit() if empty_init else nullcontext():
            yield

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Return a context in which new tensors are on the device, of the right dtype."""
        with self.root_device, self.precision.init_context():
            yield

    # -- collectives

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the data unchanged, since the only rank has all of them."""
        return tensor

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Return the data unchanged, since the only rank has all of them."""
        return tensor

    # -- state

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's weights by name."""
        return (
            self.model_state(module.prepared)
            if isinstance(module, LiteModule)
            else (module.state_dict())
        )

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load a module's weights.

        Args:
            module: the module.
            state_dict: the return value of `get_module_state_dict`.
            strict: raise for missing and unexpected names.
        """
        module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filter | None = None,
    ) -> None:
        """Save modules, optimizers, objects with a state_dict, and plain values, on rank 0.

        Args:
            path: the path of the file.
            state: the objects by name.
            storage_options: unsupported by all formats here.
            filter: see `Fabric.save`.

        Raises:
            ConfigurationError: `storage_options` is not None.
        """
        if storage_options is not None:
            raise ConfigurationError(
                f"save_checkpoint(storage_options={storage_options!r}): expected None; give them "
                "to a CheckpointIO of your own"
            )
        checkpoint = collect(self, state if filter is None else filtered(state, filter))
        if self.is_global_zero:
            io: Any = self.checkpoint_io
            # One that was written for Lightning may require the argument.
            parameters = inspect.signature(io.save_checkpoint).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            takes = takes_any or "storage_options" in parameters
            options = {"storage_options": None} if takes else {}
            io.save_checkpoint(checkpoint=checkpoint, path=path, **options)

    def load_checkpoint(
        self,
        path: PathLike,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file of `save_checkpoint`, or a file with a single state dict.

        Args:
            path: the path of the file.
            state: a dict that is filled in place; a module or an optimizer, for a file with its
                state dict; None: the call only returns the file's contents.
            strict: raise for a file that lacks an entry of `state`, or weights that do not match.
            weights_only: ignored: loading never executes code from a checkpoint.

        Returns:
            The entries of the file that were not loaded into `state`.

        Raises:
            KeyError: an entry of `state` is not in the file.
        """
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(path)  # type: ignore[arg-type]
        if not state:
            return checkpoint
        if isinstance(state, Optimizer):
            state.load_state_dict(checkpoint)
            return {}
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, checkpoint, strict=strict)
            return {}
        for name in state if strict else ():
            if name not in checkpoint:
                raise KeyError(
                    f"the state contains a key {name!r} that does not exist in {path}: pass "
                    "strict=False to leave it as it is"
                )
        rest = dict(state)
        for name, target in state.items():
            if isinstance(target, nn.Module) and not isinstance(target, LiteModule):
                del rest[name]
                if name in checkpoint:
                    self.load_module_state_dict(target, checkpoint.pop(name), strict=strict)
        restore(self, checkpoint, rest, path=path, strict=strict)
        state.update(rest)
        return checkpoint
