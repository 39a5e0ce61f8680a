"""BitsandbytesPrecision: linear layers with weights in 4 or 8 bits."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stratagem.accelerators import Accelerator
from stratagem.errors import ConfigurationError
from stratagem.precision import TruePrecision
from stratagem_cuda.precision.layers import (
    as_names,
    find_adapters,
    find_layers,
    warn_unless_converted,
)
from stratagem_cuda.precision.requirement import BITSANDBYTES

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


class BitsandbytesPrecision(TruePrecision):
    """Weights of linear layers in 4 or 8 bits, for evaluation and for training other weights.

    The weights are frozen, and take a quarter or half of the memory; the rest of the model, such as
    adapters (LoRA), is in `dtype` and trains. Only the class `torch.nn.Linear` itself is quantised;
    layers that share their weight with another module are unchanged. So are the adapters of PEFT
    and, if some linear layers of the model are frozen before, the layers that train.

    Weights are quantised when the model is set up, from their current values: load a plain
    checkpoint into the model before. `Trainer(weights=folder)` reads plain weights afterwards, too.
    A checkpoint contains the quantised weights, bit for bit, with
    the scales as separate entries (`layer.weight_nf4_absmax`). It loads into the same mode only;
    other modes, or a model that is not quantised, reject it.

    Args:
        mode: "nf4" or "fp4" (Dettmers et al., 2023, "QLoRA"), with "-dq" also the scales are
            quantised; "int8" (Dettmers et al., 2022, "LLM.int8()"); "int8-training" multiplies in
            int8, and keeps and trains the weights in float16.
        dtype: the dtype of the other weights and of layer outputs. None: bfloat16, or float16 for
            int8, which accepts only float16.
        ignore_modules: names of modules that are not quantised, such as {"lm_head"}.

    Raises:
        ConfigurationError: an argument is invalid; or, from `bind`, bitsandbytes is missing.

    Example:
        >>> from stratagem_cuda.precision import BitsandbytesPrecision
        >>> BitsandbytesPrecision("nf4-dq", ignore_modules={"lm_head"}).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        mode: str = "nf4",
        dtype: torch.dtype | None = None,
        ignore_modules: Collection[str] = (),
    ) -> None:
        if mode not in MODES:
            raise ConfigurationError(
                f"BitsandbytesPrecision(mode={mode!r}): expected one of "
                f"{', '.join(map(repr, MODES))}"
            )
        is_int8 = mode.startswith("int8")
        super().__init__("16-true" if is_int8 else "bf16-true")
        if dtype is not None and is_int8 and dtype is not torch.float16:
            raise ConfigurationError(
                f"BitsandbytesPrecision({mode!r}, dtype={dtype}): int8 computes in torch.float16 "
                "only; leave dtype out, or take 'nf4'"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(
                f"BitsandbytesPrecision({mode!r}, dtype={dtype!r}): expected a floating-point "
                "dtype such as torch.bfloat16"
            )
        self.name = self.mode = mode
        self.dtype = dtype or self.dtype
        self.ignore_modules = as_names(ignore_modules)

    def bind(self, accelerator: Accelerator) -> None:
        """Look for bitsandbytes."""
        BITSANDBYTES.check(self.name)
        super().bind(accelerator)
        self._accelerator = accelerator

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Quantise the weights of linear layers in place, and convert everything else."""
        # It imports bitsandbytes, which only ranks need.
        from stratagem_cuda.precision.quantized_linear import QuantizedLinear, quantize

        owners: dict[int, int] = {}
        for part in module.modules():
            for parameter in part._parameters.values():
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        layers = [x for x in self._layers_to_quantize(module) if owners[id(x.weight)] == 1]
        with self._whole_weights(layers):
            for layer in layers:
                quantize(layer, self.mode)
        warn_unless_converted(
            module, self.name, lambda part: isinstance(part, QuantizedLinear), "torch.nn.Linear"
        )
        return super().convert_module(module)

    def _whole_weights(self, layers: list[nn.Linear]) -> AbstractContextManager[Any]:
        """Return a context in which weights that a build has divided are whole at a read.

        Raises:
            ConfigurationError: a weight is a shard, or has no values yet.
        """
        for layer in layers:
            if isinstance(layer.weight, DTensor) or layer.weight.is_meta:
                where = "on the meta device" if layer.weight.is_meta else "divided between ranks"
                raise ConfigurationError(
                    f"precision={self.name!r}: a linear layer of the model is {where} before its "
                    "weights are quantised; expected values: build the model in __init__ or in "
                    "configure_model, and load its weights there"
                )
        if not dist.is_initialized() or not layers:
            return nullcontext()
        from stratagem_torch.sharding import DeferredBuild

        # Each weight is freed when it was quantised, so the build never has to divide it again.
        return DeferredBuild(self._accelerator, layers[0].weight.device, whole_bytes=sys.maxsize)

    def _layers_to_quantize(self, module: nn.Module) -> list[nn.Linear]:
        """Return the linear layers of a model, without those that the user lets train."""
        adapters = set(find_adapters(module))
        found = find_layers(module, nn.Linear, self.ignore_modules).values()
        layers = [layer for layer in found if layer not in adapters]
        frozen = [layer for layer in layers if not layer.weight.requires_grad]
        # If the user has frozen no parameter, this precision freezes all.
        return frozen if frozen and self.mode != "int8-training" else layers
