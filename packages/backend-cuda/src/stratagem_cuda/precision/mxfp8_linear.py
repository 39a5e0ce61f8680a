"""The linear layer of MXFP8Precision, by torchao's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK = 32
"""The numbers that share a scale."""
_ROWS = 128
"""The kernels take multiples of this number of rows."""


class MXFP8Linear(nn.Linear):
    """A linear layer that multiplies in MXFP8, forward and backward; results are bfloat16.

    A mesh may divide the weight into parts that are not whole blocks. They multiply in bfloat16.

    Attributes:
        emulate: round on any device, and multiply in full precision.
        exact_weight_gradients: compute the gradient of the weight in bfloat16.
    """

    emulate: bool
    exact_weight_gradients: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias, in bfloat16."""
        weight = self.weight.to(torch.bfloat16)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        if any(size % BLOCK for size in weight.shape):
            return linear(input.to(torch.bfloat16), weight, bias)
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        count = rows.shape[0]
        # Rows of zeros change neither the other rows nor the gradient of the weight.
        rows = pad(rows, (0, 0, 0, -count % (BLOCK if self.emulate else _ROWS)))
        product: Any = mx_mm.apply
        output: Tensor = product(
            rows,
            weight,
            *(torch.float8_e4m3fn,) * 3,
            BLOCK,
            KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO,
            # torchao's wheels have its CUDA kernel for one version of Python only.
            MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.TRITON,
            ScaleCalculationMode.RCEIL,
            self.exact_weight_gradients,
        )
        output = output[:count].reshape(*input.shape[:-1], weight.shape[0])
        return output if bias is None else output + bias
