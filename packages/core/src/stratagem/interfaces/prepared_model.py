"""PreparedModel: a model and its optimizers, prepared by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compile import compile_model
from stratagem.errors import ConfigurationError, PluginError
from stratagem.plan.step_options import Compilation


class StepModule(nn.Module):
    """A wrapper of the user's module; its forward calls a method of that module by name.

    DDP and FSDP act in the forward of the module that they wrap. If they wrap a `StepModule`, they
    act around `training_step` and every other called method, not only around the model's `forward`.

    Args:
        module: the user's module; `user_module` returns it.

    Example:
        >>> import torch
        >>> from stratagem.strategies import StepModule
        >>> class Net(torch.nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().mean()
        >>> StepModule(Net(2, 1))("training_step", torch.zeros(3, 2)).shape
        torch.Size([])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def runs_backward(self) -> bool:
        """Whether the called methods run backward, as a Module with manual optimization does."""
        return not getattr(self.module, "automatic_optimization", True)

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return `module.<method>(*args, **kwargs)`."""
        if method == "forward":
            return self.module(*args, **kwargs)
        return getattr(self.module, method)(*args, **kwargs)

    # Canonical names are the names in the user's model, without a prefix for this module.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's parameters with their own names."""
        return self.module.named_parameters(*args, **kwargs)


Optimizers = Sequence[Optimizer] | Callable[[], Sequence[Optimizer]]


@dataclass(eq=False)
class PreparedModel:
    """A model and its optimizers, prepared by a strategy.

    Attributes:
        module: the module to call: a wrapper (DDP), an engine (DeepSpeed), or the module itself.
        original: the module that was passed to `prepare`, a `StepModule` in both front ends. Its
            parameter names are the canonical names. `user_module(prepared.original)` returns the
            user's module.
        optimizers: the optimizers, with the parameters after wrapping and sharding.
        evaluation_module: the module to call without gradients. It differs from `module` if the
            wrapper communicates in forward, since ranks may run different numbers of batches.
        clear_gradients: a function for each optimizer that sets the gradients of its parameters to
            None.
        run_backward: a function that runs backward. It takes the loss, then the arguments of
            `Tensor.backward`. A Module's own `backward` replaces it.
        strategy_data: objects that the strategy keeps for this model, such as residuals or counts.
            Empty at first, and freed with the model. `Strategy.state` saves them.

    Example:
        >>> from torch import nn
        >>> from stratagem import Lite
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> prepared = lite.strategy.prepare(nn.Linear(2, 1))
        >>> prepared.module is prepared.original
        True
    """

    module: nn.Module
    original: nn.Module
    optimizers: list[Optimizer]
    evaluation_module: nn.Module
    clear_gradients: list[Callable[[], None]] = field(init=False)
    run_backward: Callable[..., None] = field(init=False)
    strategy_data: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if callable(self.optimizers):
            raise PluginError(
                f"PreparedModel(optimizers={self.optimizers!r}): expected a list of optimizers; "
                "call make_optimizers(optimizers) after wrapping, and pass what it returns"
            )
        self.run_backward = Tensor.backward
        self.clear_gradients = [self.gradient_clearer(one) for one in self.optimizers]

    def compile(self, compilation: Compilation) -> None:
        """Compile the model with torch.compile, in place; parameter names do not change.

        Called once the model is prepared, if `compile=...` requests it and `capabilities.compiles`
        contains "model". An engine with its own compilation returns a subclass that overrides this.
        """
        compile_model(user_module(self.original), compilation, self.groups_to_compile())

    def groups_to_compile(self) -> list[nn.Module]:
        """Return the modules to compile separately; an empty list compiles the whole model."""
        return []

    def reshard(self) -> None:
        """Reshard parameters that stay gathered after a forward pass; by default do nothing.

        Afterwards `parameters()` returns the same parameters as between two steps.
        """

    def gradient_clearer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that sets the gradients of the optimizer's parameters to None.

        `Optimizer.zero_grad` spends 6 us per call on a profiler range and bookkeeping; this loop
        takes 0.1 us. If the optimizer's class overrides `zero_grad`, that is returned instead.
        """
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            return optimizer.zero_grad

        # A partial, since nested functions can be neither copied nor pickled.
        return partial(_clear_gradients, optimizer)


def _clear_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def user_module(module: nn.Module) -> nn.Module:
    """Return the user's module: the module in a `StepModule`, or else `module` itself.

    Args:
        module: the argument of `Strategy.prepare` or `wrap`, or `PreparedModel.original`.

    Example:
        >>> from torch import nn
        >>> from stratagem.strategies import StepModule, user_module
        >>> user_module(StepModule(nn.Linear(2, 1)))
        Linear(in_features=2, out_features=1, bias=True)
    """
    return module.module if isinstance(module, StepModule) else module


def make_optimizers(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers; if `optimizers` is a function, call it.

    Example:
        >>> import torch
        >>> from stratagem.strategies import make_optimizers
        >>> weights = torch.ones(2, requires_grad=True)
        >>> len(make_optimizers(lambda: [torch.optim.SGD([weights], lr=0.1)]))
        1
    """
    return list(optimizers() if callable(optimizers) else optimizers)


class ParameterReferences:
    """Attributes and hooks of a model's parameters, and all references to the parameters.

    `Module.to` usually changes a parameter's data. For some devices (PrivateUse1, XLA) it creates
    a new Parameter in each module instead. Without an error, optimizers would then step the old
    parameters, tied weights would no longer be tied, and attributes and hooks would be lost.

    Args:
        module: the model, before a conversion.
        optimizers: optimizers of the model's parameters. Their other parameters do not change.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> references = ParameterReferences(model, [optimizer])
        >>> model.weight = nn.Parameter(model.weight.detach().clone())
        >>> references.restore(model)
        >>> optimizer.param_groups[0]["params"][0] is model.weight
        True
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for attribute, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((owner, attribute))
        self._tied = [places for places in owners.values() if len(places) > 1]
        named = dict(module.named_parameters())
        # Keep no references to the parameters: a conversion frees their memory one by one.
        self._own = {name: _own_of(parameter) for name, parameter in named.items()}
        names = {id(parameter): name for name, parameter in named.items()}
        self._optimizers = [
            (
                optimizer,
                [[names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups],
            )
            for optimizer in optimizers
        ]

    def restore(self, module: nn.Module) -> None:
        """Tie shared weights again, and put the model's parameters into the optimizers.

        A new parameter gets the attributes and the hooks of the former one. The state of each
        optimizer moves to the device of its parameters.

        Raises:
            ConfigurationError: an optimizer's parameter is no longer in the model.
        """
        for (first, name), *others in self._tied:
            shared = first._parameters[name]
            for owner, attribute in others:
                if owner._parameters[attribute] is not shared:
                    setattr(owner, attribute, shared)
        now = dict(module.named_parameters())
        for name in self._own.keys() & now.keys():
            _give(now[name], *self._own[name])
        for optimizer, groups in self._optimizers:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for index, name in enumerate(names):
                    if not name:
                        continue  # another model's
                    if name not in now:
                        raise ConfigurationError(
                            f"the {type(optimizer).__name__} holds the parameter {name!r}, which "
                            "the model has no longer after its conversion: make the optimizer "
                            "after setup(model)"
                        )
                    _put(optimizer, group["params"], index, now[name])


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _own_of(parameter: nn.Parameter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes that user code has set on a parameter, and its hooks."""
    return dict(vars(parameter)), {name: getattr(parameter, name) for name in _HOOKS}


def _give(parameter: nn.Parameter, attributes: dict[str, Any], hooks: dict[str, Any]) -> None:
    """Set the attributes and hooks that a parameter does not have."""
    for name, value in attributes.items():
        if name not in vars(parameter):
            setattr(parameter, name, value)
    for name, hooked in hooks.items():
        # The same dict, so that the handle of a hook still removes it.
        if hooked and getattr(parameter, name) is None:
            setattr(parameter, name, hooked)


def _put(optimizer: Optimizer, parameters: list[Any], index: int, after: nn.Parameter) -> None:
    before = parameters[index]
    parameters[index] = after
    if before in optimizer.state:
        state = optimizer.state.pop(before)
        optimizer.state[after] = {
            key: value.to(after.device)
            if isinstance(value, Tensor) and value.shape == after.shape != ()
            else value
            for key, value in state.items()
        }
