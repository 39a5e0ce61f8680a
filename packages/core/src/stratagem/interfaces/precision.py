"""Precision: the dtypes of parameters, activations and gradients."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.pytree import convert_floats, convert_module_floats
from stratagem.interfaces.accelerator import Accelerator


class Precision(ABC):
    """The dtypes of parameters, activations and gradients.

    Call sequence, from the second call on every rank:
        1. `bind(accelerator)`, by `Strategy.bind`, in the process that the user started.
        2. `init_context()` around the code that builds the model.
        3. `convert_module(module)` in `Strategy.prepare`, before the optimizers are made.
        4. `input_converter()` and `forward_context()` once, and under Lite `output_converter()`.
           Each step uses the returned functions and the context.
        5. At each step: `scale_loss` before backward, `unscale_gradients` before clipping,
           `optimizer_step` in place of `optimizer.step()`.
        6. `state_dict` and `load_state_dict` with each checkpoint.

    The defaults are full precision: they convert nothing and have no cost.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.precision import Precision
        >>> class Bfloat16Parameters(Precision):
        ...     name = "bf16-parameters"
        ...     def convert_module(self, module):
        ...         return module.to(torch.bfloat16)
        >>> lite = Lite(accelerator="cpu", plugins=Bfloat16Parameters())
        >>> lite.launch()
        >>> lite.setup(torch.nn.Linear(2, 1)).weight.dtype
        torch.bfloat16
    """

    name: str
    """The name that selects this precision, such as "bf16-mixed"."""
    dtype: torch.dtype = torch.float32
    """The dtype of large matrix products."""
    shardable: bool = True
    """Whether the converted parameters can be sharded. If False, strategies with sharded state
    reject this precision."""
    scales_loss: bool = False
    """Whether the loss is scaled. If False, `optimizer_step` is never called."""
    inference_mode: bool = True
    """Whether tensors of this precision work under `torch.inference_mode`. Otherwise evaluation
    runs under `torch.no_grad`."""
    step_was_skipped: bool = False
    """Whether the last optimizer step was skipped because gradients were not finite. A skipped step
    is not counted. The value is the same on every rank. `optimizer_step` sets it, as does a
    strategy whose engine scales losses, or whose own `optimizer_step` leaves steps out."""

    def bind(self, accelerator: Accelerator) -> None:
        """Set the model's accelerator; called once before each launch.

        Raises:
            ConfigurationError: the devices do not support this precision.
        """

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have the parameters' dtype."""
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the parameters in place and return the module."""
        return module

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts a batch, if batches need conversion.

        None: they are passed on as they are.
        """
        return None

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts outputs to the default dtype; used by Lite.

        None: outputs have it already. Users compute losses of outputs and float32 targets.
        """
        return None

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a new context for forward passes that can be entered many times, or None."""
        return None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of the gradients, so that they can be clipped."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, such as a loss scale, as weights-only-safe data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. {}, from a checkpoint of another precision, resets it."""


class EnginePrecision(Precision):
    """A precision for a strategy with an engine that converts parameters and scales losses.

    Batches are converted to the model's dtype. Under Lite, the model's outputs are converted back.

    Args:
        name: "bf16-mixed", "bf16-true", "16-mixed" or "16-true".

    Example:
        >>> import torch
        >>> from stratagem.precision import EnginePrecision
        >>> EnginePrecision("16-mixed").input_converter()(torch.ones(2)).dtype
        torch.float16
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = torch.bfloat16 if name.startswith("bf16") else torch.float16

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a model that is only evaluated, so that no engine runs it."""
        return convert_module_floats(module, self.dtype)

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts floating-point tensors to the dtype of the model."""
        return lambda batch: convert_floats(batch, self.dtype)

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts outputs to the default dtype."""
        return lambda output: convert_floats(output, torch.get_default_dtype())


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context in which new floating-point tensors have `dtype`.

    Example:
        >>> from stratagem.precision import default_dtype
        >>> with default_dtype(torch.float64):
        ...     torch.ones(1).dtype
        torch.float64
    """
    return _DefaultDtype(dtype)


class _DefaultDtype(AbstractContextManager[None]):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self.before)
