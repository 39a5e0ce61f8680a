"""What Lite's setup methods return: a model, an optimizer and a data loader like the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.data.pytree import move_to_device
from stratagem.data.resumable import Resumable
from stratagem.data.sharding import length_of, set_epoch
from stratagem.interfaces.strategy import Prepared, Strategy
from stratagem.rng_state import random_state, set_random_state


class LiteModule(nn.Module):
    """A model as the strategy runs it; attributes and methods are those of the user's model.

    Calling it, or a method of the model that was marked with `mark_forward_method`, goes through
    the strategy's wrapper and the precision's context. The state dict has the model's own names.
    """

    def __init__(self, module: nn.Module, prepared: Prepared, strategy: Strategy) -> None:
        super().__init__()
        precision = strategy.precision
        # The model's own tables, so that what nn.Module does with them (buffers, children, to) it
        # does to the model.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]
        # Plain attributes: registered as submodules they would double every parameter.
        self.__dict__["module"] = module
        self.__dict__["prepared"] = prepared
        self.__dict__["_strategy"] = strategy
        self.__dict__["_forward_methods"] = {"training_step", "validation_step", "test_step"}
        self.__dict__["_context"] = precision.forward_context()
        self.__dict__["_convert_input"] = precision.input_converter()
        self.__dict__["_convert_output"] = precision.output_converter()
        # Nothing wraps or hooks the model and nothing is converted: it is called as it is.
        self.__dict__["_is_direct"] = (
            prepared.module is prepared.original
            and not prepared.module._forward_pre_hooks
            and self._context is None
            and self._convert_input is None
            and self._convert_output is None
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        own = self.__dict__
        if own["_is_direct"]:
            return own["module"](*args, **kwargs)
        return self._call("forward", *args, **kwargs)

    def _module_to_call(self) -> nn.Module:
        prepared: Prepared = self.__dict__["prepared"]
        return prepared.module if torch.is_grad_enabled() else prepared.evaluation_module

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        if own["_convert_input"] is not None:
            args, kwargs = own["_convert_input"](args), own["_convert_input"](kwargs)
        try:
            if own["_context"] is None:
                output = self._module_to_call()(method, *args, **kwargs)
            else:
                with own["_context"]:
                    output = self._module_to_call()(method, *args, **kwargs)
        except RuntimeError as error:
            explained = own["_strategy"].explain(own["prepared"], error)
            if explained is None:
                raise
            raise explained from error
        return output if own["_convert_output"] is None else own["_convert_output"](output)

    def mark_forward_method(self, method: str) -> None:
        """Let a method of the model run through the strategy, as `forward` does."""
        self.__dict__["_forward_methods"].add(method)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_forward_methods"]:
            getattr(self.__dict__["module"], name)  # so that a missing one is said to be missing
            return lambda *args, **kwargs: self._call(name, *args, **kwargs)
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["module"], name, value)

    def train(self, mode: bool = True) -> LiteModule:
        """Set training or evaluation mode."""
        self.__dict__["prepared"].module.train(mode)
        self.__dict__["training"] = mode
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the model's parameters, as the strategy holds them."""
        return self.__dict__["module"].parameters(recurse)  # type: ignore[no-any-return]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's parameters with their own names."""
        return self.__dict__["module"].named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model and its submodules with their own names."""
        return self.__dict__["module"].named_modules(*args, **kwargs)

    def apply(self, function: Callable[[nn.Module], None]) -> LiteModule:
        """Call a function with the model and each of its submodules."""
        self.__dict__["module"].apply(function)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, under its own names."""
        return self.__dict__["_strategy"].model_state(self.__dict__["prepared"])

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's state."""
        self.__dict__["_strategy"].load_model_state(
            self.__dict__["prepared"], state_dict, strict=strict
        )


class LiteOptimizer:
    """The user's optimizer, whose step goes through the strategy.

    An instance also passes for the optimizer's own class, so that schedulers take it.
    """

    optimizer: Optimizer
    prepared: Prepared
    strategy: Strategy
    _clear_gradients: Callable[[], None]

    @property
    def state(self) -> Any:
        """The user's optimizer's state; loading replaces that object, so it is looked up there."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        """The user's optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        """The user's optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        """Step through the strategy."""
        return self.strategy.optimizer_step(self.prepared, self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if set_to_none:
            self._clear_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names."""
        return self.strategy.optimizer_state(self.prepared, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state by parameter names."""
        self.strategy.load_optimizer_state(self.prepared, self.optimizer, state)


_SHADOWING = ("step", "zero_grad", "state_dict", "load_state_dict")


def wrap_optimizer(optimizer: Optimizer, prepared: Prepared, strategy: Strategy) -> Any:
    """Return a `LiteOptimizer` that stands for the user's optimizer."""
    kind = type(f"Lite{type(optimizer).__name__}", (LiteOptimizer, type(optimizer)), {})
    wrapped: Any = object.__new__(kind)
    # A scheduler made earlier has put a counting `step` on the instance: ours comes first, and
    # calls it.
    wrapped.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name not in _SHADOWING}
    )
    wrapped.optimizer, wrapped.prepared, wrapped.strategy = optimizer, prepared, strategy
    wrapped._clear_gradients = strategy.gradient_clearer(optimizer)
    return wrapped


class LiteDataLoader:
    """A data loader whose batches come on the device; attributes are those of the user's loader.

    `Lite.save` keeps its place, and the random numbers of every rank. After `Lite.load` the next
    loop over it goes on from there: inside an epoch with the batch that would have come next, after
    the last one with the next epoch. A loop that was left by `break` is inside an epoch.

    Args:
        loader: of this rank.
        device: where batches are moved to; None: they stay.
        name: stands for it in messages.
        rank: this process's.
        shard: this rank's part of the data, (index, count).
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | None,
        name: str = "the data loader",
        rank: int = 0,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.loader = loader
        self._device = None if device is None or device.type == "cpu" else device
        self._rank = rank
        self._data = Resumable(loader, name, rank, shard)
        self._epoch = 0
        """Of the next iteration, unless the user sets it by hand."""
        self._last = 0
        self._begun: Any = None
        """The present epoch's batches; None: between two epochs."""
        self._done = 0
        """Batches of the present epoch that `_begun` does not count."""
        self._random: dict[str, Any] | None = None

    @property
    def sampler(self) -> Any:
        """The loader's sampler, or None."""
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Without it a distributed sampler repeats one order in every epoch. A user who sets the
        # epoch by hand is left to it.
        if getattr(self.sampler, "epoch", self._last) == self._last:
            set_epoch(self.loader, self._epoch)
            self._last = self._epoch
            self._epoch += 1
        if self._begun is not None:
            self._done = 0  # the loop before was left, and this is another epoch
        batches, _ = self._data.begin(self._present_epoch(), self._done, length_of(self.loader))
        if self._random is not None:
            # Last, since the loader has drawn numbers of its own.
            set_random_state(self._random)
            self._random = None
        # What a DataLoader has passed over, it has counted.
        self._done -= getattr(batches, "_num_yielded", 0)
        self._begun = batches
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        ready = batches if hasattr(batches, "_num_yielded") else self._counted(batches)
        if self._device is not None:
            ready = map(partial(move_to_device, device=self._device), ready)
        yield from ready
        if self._begun is batches:
            self._begun, self._done = None, 0

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches of what does not count them itself, as a DataLoader's iterator does."""
        for batch in batches:
            self._done += 1
            yield batch

    def _present_epoch(self) -> int:
        epoch: int = getattr(self.sampler, "epoch", self._last)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in the data, and its random numbers."""
        batches = self._done + getattr(self._begun, "_num_yielded", 0)
        return {
            "epoch": self._present_epoch() if batches else self._epoch,
            "batches": batches,
            "random": random_state(),
            "loader": self._data.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank, among as many ranks."""
        self.resume([state] * (self._rank + 1))

    def resume(self, states: list[dict[str, Any]]) -> None:
        """Go on from what `state_dict` returned on each rank.

        Of more ranks than saved, the further ones keep their own random numbers.
        """
        batches = states[0]["batches"]
        self._epoch = states[0]["epoch"]
        self._begun = None
        self._done = self._data.resume([state["loader"] for state in states], batches)
        if self._rank < len(states):
            # Once more when the iteration begins, if that is to draw what was drawn before.
            set_random_state(states[self._rank]["random"])
            self._random = states[self._rank]["random"] if batches else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
