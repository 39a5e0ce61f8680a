"""TruePrecision and MixedPrecision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from stratagem.accelerators import Accelerator
from stratagem.data.pytree import convert_floats, convert_module_floats
from stratagem.errors import ConfigurationError
from stratagem.precision import Precision, default_dtype

_DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


class TruePrecision(Precision):
    """Parameters, activations, gradients and floating-point inputs all have one dtype.

    Args:
        name: "64-true", "32-true", "16-true" or "bf16-true".

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.precision import TruePrecision
        >>> Lite(accelerator="cpu", plugins=TruePrecision("64-true")).plan.precision.name
        '64-true'
    """

    def __init__(self, name: str = "32-true") -> None:
        if name not in _DTYPES:
            raise ConfigurationError(
                f"TruePrecision(name={name!r}): expected one of {', '.join(map(repr, _DTYPES))}"
            )
        self.name = name
        self.dtype = _DTYPES[name]

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have this dtype."""
        return default_dtype(self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert floating-point parameters and buffers; "32-true" leaves the module unchanged."""
        if self.dtype is torch.float32:
            return module
        return convert_module_floats(module, self.dtype)

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts floating-point tensors, or None for float32."""
        if self.dtype is torch.float32:
            return None
        return lambda batch: convert_floats(batch, self.dtype)

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts outputs to the default dtype, or None for float32."""
        if self.dtype is torch.float32:
            return None
        return lambda output: convert_floats(output, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a context in which new tensors have this dtype, or None for float32."""
        return None if self.dtype is torch.float32 else default_dtype(self.dtype)


class MixedPrecision(Precision):
    """Parameters stay in float32; autocast runs operations in bfloat16 where that is safe.

    Loss scaling is not needed: bfloat16 has the range of float32. The accelerator provides the
    autocast; before an accelerator is bound, the autocast is for the CPU.

    Args:
        name: "bf16-mixed".

    Raises:
        ConfigurationError: the name is different; or, from `bind`, the accelerator cannot autocast
            to `dtype`.

    Example:
        >>> import torch
        >>> from stratagem.precision import MixedPrecision
        >>> with MixedPrecision().forward_context():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """

    dtype = torch.bfloat16
    """What operations are autocast to."""

    def __init__(self, name: str = "bf16-mixed") -> None:
        if name != "bf16-mixed":
            raise ConfigurationError(
                f"MixedPrecision(name={name!r}): expected 'bf16-mixed'; '16-mixed' needs loss "
                "scaling on a GPU and is provided by stratagem-backend-cuda"
            )
        self.name = name
        self._autocast: Callable[..., AbstractContextManager[Any] | None]
        self._autocast = partial(torch.autocast, "cpu")

    def bind(self, accelerator: Accelerator) -> None:
        self._autocast = accelerator.autocast
        if self.forward_context() is None:
            dtype, parameters = (
                str(self.dtype).partition(".")[2],
                self.name.replace("mixed", "true"),
            )
            raise ConfigurationError(
                f"precision={self.name!r}: the accelerator {accelerator.name!r} cannot autocast to "
                f"{dtype}, so the model would compute in float32: pass precision='32-true', or "
                f"{parameters!r} to keep parameters in {dtype} too"
            )

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return an autocast context, a new one: torch's cannot be entered within itself."""
        return self._autocast(self.dtype)

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that converts outputs to the default dtype."""
        return lambda output: convert_floats(output, torch.get_default_dtype())
