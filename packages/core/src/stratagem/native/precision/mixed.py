"""MixedPrecision: full-precision parameters, autocast in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stratagem.data.pytree import convert_floats
from stratagem.errors import ConfigurationError
from stratagem.interfaces.precision import Precision


class MixedPrecision(Precision):
    """Parameters stay in float32; autocast chooses bfloat16 for the operations that bear it.

    Needs no loss scaling: bfloat16 has the range of float32.

    Args:
        name: "bf16-mixed".
        device_type: the device type that autocast is for.

    Example:
        >>> import torch
        >>> from stratagem.precision import MixedPrecision
        >>> with MixedPrecision().forward_context():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """

    def __init__(self, name: str = "bf16-mixed", *, device_type: str = "cpu") -> None:
        if name != "bf16-mixed":
            raise ConfigurationError(
                f"MixedPrecision(name={name!r}): expected 'bf16-mixed'; '16-mixed' needs loss "
                "scaling on a GPU and is provided by stratagem-backend-cuda"
            )
        self.name = name
        self._autocast = torch.autocast(device_type, dtype=torch.bfloat16)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the autocast context; the same object serves every step."""
        return self._autocast

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return what converts outputs to float32."""
        return lambda output: convert_floats(output, torch.get_default_dtype())
