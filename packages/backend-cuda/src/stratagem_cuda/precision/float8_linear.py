"""The linear layer of Float8Precision: torchao's, and bfloat16 where its kernels cannot."""

from __future__ import annotations

from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear as _Float8Linear

from stratagem_cuda.precision.layers import MULTIPLE


class Float8Linear(_Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A linear layer that multiplies in float8.

    A mesh may divide the weight into parts whose sizes its kernels do not take. They multiply in
    bfloat16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        if any(size % MULTIPLE for size in self.weight.shape):
            return nn.Linear.forward(self, input)
        output: Tensor = super().forward(input)
        return output
