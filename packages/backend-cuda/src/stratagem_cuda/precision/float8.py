"""Float8Precision: linear layers multiply in float8, by torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, nn

from stratagem_cuda.precision.compute_capability import check_current_float8
from stratagem_cuda.precision.layers import (
    FLOAT8_LINEAR,
    become,
    find_float8_linear,
    warn_unless_converted,
)
from stratagem_cuda.precision.objections import FLOAT8_KERNELS
from stratagem_cuda.precision.requirement import TORCHAO
from stratagem_cuda.precision.scaled import ScaledPrecision

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Float8Precision(ScaledPrecision):
    """Parameters stay in float32; linear layers multiply in float8, the rest is bfloat16 autocast.

    Inputs, weights and gradients of each `torch.nn.Linear` are scaled and rounded to float8 (E4M3,
    gradients E5M2) when they are multiplied (Micikevicius et al., 2022, "FP8 Formats for Deep
    Learning"). Float8 values are temporary: parameters, optimizers and checkpoints are as under
    'bf16-mixed', with the same names, so that a checkpoint of either loads into the other. It pays
    for large layers, with `torch.compile`; small layers are faster in bfloat16.

    Layers with sizes that are not multiples of 16 stay in bfloat16, as do subclasses of
    `torch.nn.Linear`. If a mesh divides layers, the sizes of the parts count. Hooks of layers and
    references to layers remain valid.

    Args:
        name: "float8".
        recipe: one scale for a tensor ("tensorwise"), for a row ("rowwise", more exact and
            slower), or the latter with gradients of weights in bfloat16 ("rowwise_with_gw_hp").
        emulate: round as float8 does and multiply in full precision, slowly: to try it on a device
            without float8 kernels.
        ignore_modules: names of modules that stay in bfloat16, such as {"lm_head"}.

    Raises:
        ConfigurationError: an argument is invalid; or, from `bind`, torchao is missing, or no GPU
            here supports float8.

    Example:
        >>> from stratagem_cuda.precision import Float8Precision
        >>> Float8Precision(recipe="rowwise", ignore_modules={"lm_head"}).name
        'float8'
    """

    kernels = FLOAT8_KERNELS
    recipes = RECIPES

    def __init__(
        self,
        name: str = "float8",
        *,
        recipe: str = "tensorwise",
        emulate: bool = False,
        ignore_modules: Collection[str] = (),
    ) -> None:
        super().__init__(name, recipe=recipe, emulate=emulate, ignore_modules=ignore_modules)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let linear layers compute in float8, in place; parameters stay the same objects."""
        if not self.emulate:
            check_current_float8(self.name)
        # The import takes seconds, and only ranks need it.
        with TORCHAO.importing(self.name):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            from stratagem_cuda.precision.float8_linear import Float8Linear

        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=self.emulate,
            # Without padding, a batch fails if its size is no multiple of 16, such as an epoch's
            # last one.
            pad_inner_dim=True,
        )
        for layer in find_float8_linear(module, self.ignore_modules):
            # torchao returns another module with the same parameters.
            converted = convert_to_float8_training(layer, config=config)
            become(layer, Float8Linear, vars(converted))
            if self.emulate:
                layer.register_forward_pre_hook(_in_bfloat16)
        warn_unless_converted(
            module, self.name, lambda part: hasattr(part, "linear_mm_config"), FLOAT8_LINEAR
        )
        return module


def _in_bfloat16(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Do on any device what torchao does under CUDA's autocast only."""
    return tuple(each.to(torch.bfloat16) for each in inputs)
