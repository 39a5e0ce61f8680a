"""LiteModule: a model whose forward runs through the strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stratagem.errors import UserCodeError
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.strategy import Strategy


def _raise_explained(error: RuntimeError, strategy: Strategy, prepared: PreparedModel) -> NoReturn:
    from stratagem.runtime.device_errors import raise_explained  # after failures only

    raise_explained(error, strategy, prepared)


class LiteModule(nn.Module):
    """A wrapper that runs a model through the strategy, with the attributes of the user's model.

    Its forward, and methods marked with `mark_forward_method`, run through the strategy's wrapper
    and in the precision's context. If the strategy wraps the model, another method raises an error
    if it computes with the model's layers while the model is sharded or gradients are enabled. The
    state dict has the model's own names.
    """

    def __init__(self, module: nn.Module, prepared: PreparedModel, strategy: Strategy) -> None:
        super().__init__()
        precision = strategy.precision
        # The model's own tables, so that methods of nn.Module (buffers, children, to) act on the
        # model.
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
        # If nothing wraps or hooks the model, in training or in evaluation, and nothing is
        # converted, forward calls the model directly.
        self.__dict__["_is_wrapped"] = prepared.module is not prepared.original or bool(
            prepared.module._forward_pre_hooks
        )
        self.__dict__["_is_direct"] = (
            not self._is_wrapped
            and prepared.evaluation_module is prepared.original
            and self._context is None
            and self._convert_input is None
            and self._convert_output is None
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        own = self.__dict__
        if own["_is_direct"]:
            try:
                return own["module"](*args, **kwargs)
            except RuntimeError as error:
                _raise_explained(error, own["_strategy"], own["prepared"])
        return self._call("forward", *args, **kwargs)

    def _module_to_call(self) -> nn.Module:
        prepared: PreparedModel = self.__dict__["prepared"]
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
            _raise_explained(error, own["_strategy"], own["prepared"])
        return output if own["_convert_output"] is None else own["_convert_output"](output)

    def mark_forward_method(self, method: str) -> None:
        """Make a method of the model run through the strategy, as `forward` does."""
        self.__dict__["_forward_methods"].add(method)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_forward_methods"]:
            getattr(self.__dict__["module"], name)  # so that a missing one is said to be missing
            return lambda *args, **kwargs: self._call(name, *args, **kwargs)
        found = getattr(self.__dict__["module"], name)
        is_own = inspect.ismethod(found) and found.__self__ is self.__dict__["module"]
        if not is_own or not self.__dict__["_is_wrapped"] or hasattr(nn.Module, name):
            return found
        return self._watched(name, found)

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that raises an error if it computes outside the strategy.

        Otherwise its gradients would not be reduced over ranks, nor its parameters gathered.
        """
        module = self.__dict__["module"]
        is_sharded = self.__dict__["_strategy"].capabilities.sharded_state

        def refuse(part: nn.Module, args: Any) -> None:
            if (is_sharded or torch.is_grad_enabled()) and part in parts:
                raise UserCodeError(
                    f"{type(module).__name__}.{name}() computes with the model's layers outside of "
                    "the strategy, so that gradients would not be reduced over ranks, or shards "
                    f"gathered: call model.mark_forward_method({name!r}) after setup, and it goes "
                    "through the strategy as forward does"
                )

        parts: set[nn.Module] = set()

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            parts.update(module.modules())
            handle = register_module_forward_pre_hook(refuse)
            try:
                return method(*args, **kwargs)
            finally:
                handle.remove()

        return call

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
