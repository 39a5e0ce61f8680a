"""QuantizedLinear: a linear layer whose weight bitsandbytes has quantised.

bitsandbytes has modules of its own, which hide the scales in an attribute of the weight. Here they
are parameters like any other, so that moving, copying, broadcasting, saving and loading a layer
needs no code of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from stratagem_cuda.precision.layers import become

OUTLIERS = 6.0
"""Columns of inputs with larger values are multiplied in float16 ("LLM.int8()", section 3.2)."""


class QuantizedLinear(nn.Linear, ABC):
    """The layer that `quantize` makes of a torch.nn.Linear.

    Attributes:
        mode: see `BitsandbytesPrecision`.
    """

    mode: str

    @property
    def _prefix(self) -> str:
        return f"weight_{self.mode.replace('-', '_')}_"

    def _take(self, name: str) -> Any:
        return self._parameters.get(self._prefix + name)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `input`, of shape (..., in_features), by the quantised weight, in its dtype."""
        rows = input.reshape(-1, self.in_features)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return self._multiply(rows, bias).reshape(*input.shape[:-1], self.out_features)

    @abstractmethod
    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows, of shape (n, in_features), by the quantised weight."""

    @abstractmethod
    def quantize_weight(self) -> None:
        """Replace the weight by its quantised form, once."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move the layer; scales keep their dtype whatever the layer is converted to."""
        scales = {
            name: parameter.data
            for name, parameter in self._parameters.items()
            if parameter is not None and name.startswith(self._prefix)
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in scales.items():
            now = self._parameters[name]
            if now is not None and now.dtype != before.dtype:
                now.data = before.to(now.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse a weight that was not quantised in this mode, also where names need not match."""
        if prefix + "weight" in state_dict:
            scales = [name for name in self._parameters if name.startswith(self._prefix)]
            missing = [name for name in scales if prefix + name not in state_dict]
            if missing:
                *_, errors = args
                errors.append(
                    f"{prefix}weight is quantised here ({self.mode}), and not in what is loaded, "
                    f"which lacks {prefix}{missing[0]}: load it before the model is set up"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Add the mode to the text of nn.Linear."""
        return f"{super().extra_repr()}, mode={self.mode}"


class _Packed(QuantizedLinear):
    """A layer that keeps its weight in few bits only.

    Attributes:
        plain_dtype: the dtype of the weight that was quantised.
        plain_device: the device that it was quantised on.
    """

    plain_dtype: torch.dtype
    plain_device: torch.device

    def quantize_weight(self) -> None:
        weight = self.weight.detach()
        self.plain_dtype, self.plain_device = weight.dtype, weight.device
        state = self.quantized_state(weight)
        self.weight = nn.Parameter(state.pop("weight"), requires_grad=False)
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    def quantized_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the entries of the state dict, without the bias, for another weight.

        `PretrainedWeights` finds layers to quantise weights for by this method.

        Args:
            weight: the floating-point weight, of shape (out_features, in_features).
        """
        packed, scales = self._quantize(weight.to(self.plain_device, self.plain_dtype))
        return {"weight": packed} | {self._prefix + name: scales[name] for name in scales}

    @abstractmethod
    def _quantize(self, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a weight in few bits, and what dequantising needs, by names without the mode."""


class _FourBits(_Packed):
    blocksize: int

    def _quantize(self, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        kind, _, nested = self.mode.partition("-")
        packed, state = functional.quantize_4bit(
            weight.contiguous(), quant_type=kind, compress_statistics=bool(nested)
        )
        self.blocksize = state.blocksize
        scales = {"absmax": state.absmax, "quant_map": state.code}
        if state.state2 is not None:
            self.nested_blocksize = state.state2.blocksize
            scales |= {
                "nested_absmax": state.state2.absmax,
                "nested_quant_map": state.state2.code,
                "nested_offset": state.offset,
            }
        return packed, scales

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        nested = None
        if self._take("nested_absmax") is not None:
            nested = functional.QuantState(
                absmax=self._take("nested_absmax"),
                code=self._take("nested_quant_map"),
                blocksize=self.nested_blocksize,
                dtype=torch.float32,
            )
        state = functional.QuantState(
            absmax=self._take("absmax"),
            shape=torch.Size((self.out_features, self.in_features)),
            code=self._take("quant_map"),
            blocksize=self.blocksize,
            quant_type=self.mode.partition("-")[0],
            dtype=rows.dtype,
            offset=self._take("nested_offset"),
            state2=nested,
        )
        product: Tensor = bitsandbytes.matmul_4bit(
            rows, self.weight.t(), quant_state=state, bias=bias
        )
        return product


class _EightBits(_Packed):
    def _quantize(self, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        half = weight.to(torch.float16).contiguous()
        rounded, scale, _ = functional.int8_vectorwise_quant(half)
        # As one column, like 4 bits: in the shape of a plain weight it could be loaded as one.
        return rounded.view(-1, 1), {"scale": scale}

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        state = _state(is_training=self.training)
        state.has_fp16_weights = False
        state.CB = self.weight.view(self.out_features, self.in_features)
        state.SCB = self._take("scale")
        product: Tensor = bitsandbytes.matmul(rows, state.CB, bias=bias, state=state)
        return product


class _EightBitsTrained(QuantizedLinear):
    def quantize_weight(self) -> None:
        """Leave the weight unchanged: each forward quantises it."""

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        # Weights with a gradient use the training kernels of bitsandbytes on the CPU; weights
        # without one use the 8-bit kernels, as on a GPU.
        has_gradient = torch.is_grad_enabled()
        weight = self.weight if has_gradient else self.weight.detach()
        state = _state(is_training=has_gradient)
        product: Tensor = bitsandbytes.matmul(rows, weight, bias=bias, state=state)
        return product


KINDS: dict[str, type[QuantizedLinear]] = {
    **dict.fromkeys(("nf4", "nf4-dq", "fp4", "fp4-dq"), _FourBits),
    "int8": _EightBits,
    "int8-training": _EightBitsTrained,
}


def _state(*, is_training: bool) -> Any:
    """Return what bitsandbytes keeps from a forward in 8 bits to its backward."""
    state = bitsandbytes.MatmulLtState()
    state.threshold = OUTLIERS
    state.is_training = is_training
    return state


def quantize(layer: nn.Linear, mode: str) -> None:
    """Quantise a layer's weight in place; hooks, and references to the layer, stay.

    Args:
        layer: the layer, with initialized weights.
        mode: see `BitsandbytesPrecision`.
    """
    quantized = become(layer, KINDS[mode])
    quantized.mode = mode
    quantized.quantize_weight()
