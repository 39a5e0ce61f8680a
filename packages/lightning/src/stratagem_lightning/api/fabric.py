"""Fabric: Lite by Lightning's name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.lite import Lite, LiteDataLoader, LiteModule, PathLike, numbers_of
from stratagem.runtime import LiteOptimizer
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.numbers import in_order_of_distributed_sampler
from stratagem_lightning.api.core.shorthands import expand_shorthands, replace_half_on_cpu
from stratagem_lightning.api.strategies.filtering import Filter, filtered
from stratagem_lightning.api.strategies.single_device import belongs_to
from stratagem_lightning.api.utilities.data import first_of_one
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


def _refuse_set_up(optimizers: Iterable[Any], method: str) -> None:
    if any(isinstance(optimizer, LiteOptimizer) for optimizer in optimizers):
        raise ConfigurationError(
            f"An optimizer should be passed only once to the `{method}` method, received one that "
            "it has returned before: pass the optimizer as it was made"
        )


_NOTHING = object()
"""Stands for no function, since None is what a function that was called returns."""


def is_wrapped(obj: object) -> bool:
    """Whether an object is a result of `setup` or `setup_dataloaders`."""
    return isinstance(obj, (LiteModule, LiteOptimizer, LiteDataLoader))


class Fabric(Lite):
    """Lite, with Fabric's further arguments and methods.

    Args:
        *arguments, **options: of `Lite`; and `gpus` and `tpu_cores`, which are short for
            `accelerator="gpu"` or "tpu" and `devices`.
    """

    @in_lightnings_words
    def __init__(self, *arguments: Any, **options: Any) -> None:
        named = inspect.signature(Lite).bind_partial(*arguments).arguments
        if not named.keys() & options.keys():  # otherwise Lite names the duplicate argument
            options = replace_half_on_cpu(expand_shorthands({**options, **named}))
            arguments = ()
        super().__init__(*arguments, **options)
        belongs_to(self.strategy, self)

    @in_lightnings_words
    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write several values to every logger, on rank 0; as Fabric's, by keyword."""
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(metrics=numbers_of(metrics), step=step)

    @property
    def _precision(self) -> Any:
        """The precision, for another Fabric with the same; private, and libraries read it."""
        return self.strategy.precision

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            ConfigurationError: the Fabric has no logger.
        """
        if not self._loggers:
            raise ConfigurationError(
                f"{type(self).__name__} has no logger: expected one of the argument loggers, "
                "received none; pass loggers=CSVLogger() or another one"
            )
        return self._loggers[0]

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with the arguments that it takes.

        What is no method is left out with a warning.
        """
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if callable(method):
                method(*args, **_taken(method, kwargs))
                continue
            warnings.warn(
                f"Skipping the callback `{type(callback).__name__}.{hook_name}`: expected a "
                f"method, received a {type(method).__name__}",
                stacklevel=2,
            )

    @in_lightnings_words
    def setup(  # type: ignore[override]  # the model comes first, as Fabric's
        self, module: Any, *optimizers: Any, **options: Any
    ) -> Any:
        """Prepare a model and its optimizers; as `Lite.setup`.

        Args:
            module: a LightningModule logs through this Fabric from now on.
            *optimizers, **options: as there.
        """
        _refuse_set_up(optimizers, "setup")
        result = super().setup(module, *optimizers, **options)
        if isinstance(module, LightningModule):
            module.fabric = self
            wrapped = result[1:] if isinstance(result, tuple) else ()
            module.__dict__["_fabric_optimizers"] = wrapped
            module.__dict__["_fabric_module"] = result[0] if wrapped else result
        return result

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's tensors, each of shape (world_size, *shape); unchanged for one rank.

        Args:
            data: tensors, or numbers.
            group: ignored.
            sync_grads: whether gradients flow through the operation.
        """
        return first_of_one(super().all_gather(data, sync_grads=sync_grads), self.world_size)

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip gradients; as `Lite.clip_gradients`.

        Args:
            module: the return value of `setup`, or the LightningModule that was passed to `setup`.
            optimizer, clip_val, max_norm, norm_type, error_if_nonfinite: see `Lite.clip_gradients`.
        """
        name, given = (
            "clip_gradients_norm",
            {
                "max_norm": max_norm,
                "norm_type": norm_type,
                "error_if_nonfinite": error_if_nonfinite,
            },
        )
        if clip_val is not None:
            name, given = "clip_gradients_value", {"clip_val": clip_val}
        if (own := self._of_strategy(name)) is not None:
            plain = _unwrapped({"": module, "optimizer": optimizer})
            return own(plain[""], plain["optimizer"], **given)
        return super().clip_gradients(
            vars(module).get("_fabric_module", module),
            optimizer,
            clip_val=clip_val,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Prepare optimizers of models that were set up; as `Lite.setup_optimizers`.

        Raises:
            ConfigurationError: one was set up before.
        """
        _refuse_set_up(optimizers, "setup_optimizers")
        return super().setup_optimizers(*optimizers)

    def setup_dataloaders(self, *dataloaders: Any, **options: Any) -> Any:
        """Prepare data loaders; as `Lite.setup_dataloaders`.

        Raises:
            ConfigurationError: no loader is passed, or a loader was set up before.
        """
        if not dataloaders:
            raise ConfigurationError(
                "`setup_dataloaders` requires at least one dataloader, received none: pass one"
            )
        if any(isinstance(loader, LiteDataLoader) for loader in dataloaders):
            raise ConfigurationError(
                "A dataloader should be passed only once to the `setup_dataloaders` method, "
                "received one that it has returned before: pass loaders as they were made"
            )
        return super().setup_dataloaders(*dataloaders, **options)

    def _shard_loader(self, loader: Any, index: int, count: int) -> Any:
        """Return a loader that reads one rank's part of the data, in Lightning's order."""
        sharded = super()._shard_loader(loader, index, count)
        # Fabric keeps the shuffle setting of the loader, for training data too.
        return in_order_of_distributed_sampler(sharded, "", shuffles=True)

    def launch(self, function: Any = _NOTHING, *args: Any, **kwargs: Any) -> Any:
        """Start the processes; as `Lite.launch`.

        Raises:
            TypeError: the function takes no argument, and is to be given this object.
        """
        if function is _NOTHING:
            return super().launch()
        if not callable(function):
            raise TypeError(
                f"launch({function!r}): the first argument needs to be a callable, such as "
                "fabric.launch(main), without calling it"
            )
        if not inspect.signature(function).parameters:
            raise TypeError(
                f"launch({function}): the function needs to take at least one argument, the "
                "Fabric of its rank; received one without arguments"
            )
        return super().launch(function, *args, **kwargs)

    def save(
        self, path: PathLike | Mapping[str, Any], state: Any = None, filter: Filter | None = None
    ) -> None:
        """Save state; as `Lite.save`.

        Args:
            path, state: see `Lite.save`.
            filter: for names in `state`, a function of a key and its value that returns whether to
                save it.

        Raises:
            TypeError: `filter` is not a dict of functions.
            ValueError: `filter` has a name that is not in `state`.
        """
        state, path = (path, state) if isinstance(path, Mapping) else (state, path)
        if (own := self._of_strategy("save_checkpoint")) is not None:
            own(path=path, state=_unwrapped(state), filter=filter)
            return
        super().save(path, state if filter is None else filtered(state, filter))

    def load(
        self,
        path: PathLike,
        state: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; as `Lite.load`.

        Args:
            path, state, strict: see `Lite.load`.
            weights_only: ignored: loading never executes code from a checkpoint.
        """
        own = self._of_strategy("load_checkpoint")
        if own is None:
            return super().load(path, state, strict=strict)
        plain = None if state is None else _unwrapped(state)
        left: dict[str, Any] = own(path=path, state=plain, strict=strict, weights_only=weights_only)
        for name, value in (plain or {}).items():
            if state is not None and not is_wrapped(state.get(name)):
                state[name] = value
        return left

    def load_raw(
        self, path: PathLike, obj: Any, *, strict: bool = True, weights_only: bool | None = None
    ) -> None:
        """Fill a model or an optimizer from a file that is its state dict.

        Args:
            path: the path of the file.
            obj: a model or an optimizer.
            strict: raise for weights that do not match the model.
            weights_only: ignored: loading never executes code from a checkpoint.
        """
        own = self._of_strategy("load_checkpoint")
        if own is not None:
            plain = _unwrapped({"": obj})[""]
            own(path=path, state=plain, strict=strict, weights_only=weights_only)
            return
        state = super().load(path)
        if isinstance(obj, (LiteOptimizer,)) or not hasattr(obj, "named_parameters"):
            obj.load_state_dict(state)
        else:
            obj.load_state_dict(state, strict=strict)

    def _of_strategy(self, name: str) -> Callable[..., Any] | None:
        """Return a method of the strategy's, where a user has written one."""
        kind = type(self.strategy)
        method: Callable[..., Any] | None = vars(self.strategy).get(name, getattr(kind, name, None))
        if method is None or method.__module__.startswith("stratagem"):
            return None
        found: Callable[..., Any] = getattr(self.strategy, name)
        return found


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with models and optimizers as they were handed to `setup`."""
    plain = dict(state)
    for name, value in state.items():
        if isinstance(value, LiteModule):
            plain[name] = vars(value)["module"]
        elif isinstance(value, LiteOptimizer):
            plain[name] = value.optimizer
    return plain


def _taken(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that a method takes; all, if it does not say which."""
    try:
        accepted = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return arguments
    if any(p.kind is p.VAR_KEYWORD for p in accepted):
        return arguments
    names = {p.name for p in accepted if p.kind is not p.VAR_POSITIONAL}
    return {name: value for name, value in arguments.items() if name in names}
