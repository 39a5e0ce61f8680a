"""PreparedModel: a model and its optimizers as a strategy runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compile.modules import compile_model
from stratagem.interfaces.step_module import StepModule
from stratagem.plan.compilation import Compilation

Optimizers = Sequence[Optimizer] | Callable[[], Sequence[Optimizer]]


@dataclass(eq=False)
class PreparedModel:
    """A model as a strategy runs it.

    Attributes:
        module: what to call; a wrapper (DDP), an engine (DeepSpeed), or the module itself.
        original: the module that was handed to `prepare`; its parameter names are the canonical
            ones.
        optimizers: bound to the parameters as they are after wrapping and sharding.
        evaluation_module: what to call where no gradient is wanted; differs from `module` if the
            wrapper communicates in forward and ranks may run different numbers of batches.
        clear_gradients: sets the gradients of each optimizer's parameters to None.
        run_backward: runs backward from a loss, which comes first, with the arguments of
            `Tensor.backward`; a Module's own `backward` takes its place.

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

    def __post_init__(self) -> None:
        self.run_backward = Tensor.backward
        self.clear_gradients = [self.gradient_clearer(one) for one in self.optimizers]

    def compile(self, compilation: Compilation) -> None:
        """Compile the model with torch.compile, in place: its names stay as they are.

        Called once it is prepared, where `compile=...` asks for it and `capabilities.compiles` has
        "model". An engine that compiles in its own way returns a subclass that overrides this.
        """
        compile_model(_model_in(self.original), compilation, self.groups_to_compile())

    def groups_to_compile(self) -> list[nn.Module]:
        """Return the modules to compile each by itself; none: the model as its code calls it."""
        return []

    def reshard(self) -> None:
        """Let `parameters()` be what they are between two steps; nothing here.

        Where a strategy spreads them over ranks, some stay gathered after a forward pass.
        """

    def gradient_clearer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that sets the gradients of one optimizer's parameters to None.

        `Optimizer.zero_grad` costs 6 us of profiler range and bookkeeping a call, this loop 0.1 us;
        it stands in only where the optimizer's class has not overridden it.
        """
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            return optimizer.zero_grad

        # No function of its own, which nobody could copy or pickle.
        return partial(_clear_gradients, optimizer)


def _clear_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _model_in(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, StepModule) else module


def make_optimizers(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers, made now if a function was given.

    Example:
        >>> import torch
        >>> from stratagem.strategies import make_optimizers
        >>> weights = torch.ones(2, requires_grad=True)
        >>> len(make_optimizers(lambda: [torch.optim.SGD([weights], lr=0.1)]))
        1
    """
    return list(optimizers() if callable(optimizers) else optimizers)
