"""Precision: which dtypes parameters, activations and gradients have."""

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

    Call sequence, on every rank but for the first:
        1. `bind(accelerator)`, by `Strategy.bind`, in the process that the user started.
        2. `init_context()` around the code that builds the model.
        3. `convert_module(module)` in `Strategy.prepare`, before the optimizers are made.
        4. `input_converter()` and `forward_context()` once, and under Lite `output_converter()`;
           what they return is used at each step.
        5. At each step: `scale_loss` before backward, `unscale_gradients` before clipping,
           `optimizer_step` in place of `optimizer.step()`.
        6. `state_dict` and `load_state_dict` with each checkpoint.

    The defaults are full precision: nothing is converted and nothing costs anything.

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
    """The name that it is selected by, such as "bf16-mixed"."""
    dtype: torch.dtype = torch.float32
    """What large matrix products are computed in."""
    shardable: bool = True
    """Whether the parameters that `convert_module` leaves can be divided between ranks; False:
    strategies with sharded state refuse it."""
    scales_loss: bool = False
    """Whether `scale_loss`, `unscale_gradients` and `optimizer_step` do something."""
    inference_mode: bool = True
    """Whether its tensors work under `torch.inference_mode`; otherwise evaluation runs under
    `torch.no_grad` in its place."""
    step_was_skipped: bool = False
    """Whether the last optimizer step was left out, since scaled gradients were not finite: it is
    not counted then. Alike on every rank; set by `optimizer_step`, or by a strategy whose engine
    scales losses."""

    def bind(self, accelerator: Accelerator) -> None:
        """Take the accelerator that the model computes on; once before each launch.

        Raises:
            ConfigurationError: its devices cannot compute in this precision.
        """

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have the parameters' dtype."""
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the parameters in place and return the module."""
        return module

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts a batch, or None if there is nothing to convert."""
        return None

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts a model's output, or None; used by Lite."""
        return None

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a context for forward passes that can be entered again and again, or None."""
        return None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the scaling in the gradients, so that they can be clipped."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds, such as a loss scale; safe data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""


class EnginePrecision(Precision):
    """A precision that a strategy's engine implements: it converts parameters and scales losses.

    Batches are converted to the dtype that the model computes in, and what a model returns
    to Lite is converted back.

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
        """Convert a model that no engine runs, since it is only evaluated."""
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
