"""MXFP8Precision: linear layers multiply in MXFP8, by torchao."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from stratagem_cuda.precision.compute_capability import check_current_mxfp8
from stratagem_cuda.precision.layers import (
    become,
    find_linear_of,
    warn_unless_converted,
)
from stratagem_cuda.precision.objections import MXFP8_KERNELS
from stratagem_cuda.precision.requirement import TORCHAO_MX
from stratagem_cuda.precision.scaled import ScaledPrecision

RECIPES = ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp")
BLOCK = 32


class MXFP8Precision(ScaledPrecision):
    """Parameters stay in float32; linear layers multiply in MXFP8, the rest is bfloat16 autocast.

    Inputs, weights and gradients of each `torch.nn.Linear` are rounded to float8 (E4M3), with one
    scale for 32 numbers, when they are multiplied (Rouhani et al., 2023, "Microscaling Data
    Formats for Deep Learning"). Scales of 32 numbers round less than scales of tensors, as
    `Float8Precision` has by default. Parameters, optimizers and checkpoints are as under
    'bf16-mixed', with the same names.

    Layers with sizes that are not multiples of 32 stay in bfloat16, as do subclasses of
    `torch.nn.Linear`. If a mesh divides layers, the sizes of the parts count. Hooks of layers and
    references to layers remain valid.

    Args:
        name: "mxfp8".
        recipe: "mxfp8_rceil", or "mxfp8_rceil_wgrad_with_hp" with gradients of weights in bfloat16.
        emulate: round as MXFP8 does and multiply in full precision, slowly: for devices without
            its kernels.
        ignore_modules: names of modules that stay in bfloat16, such as {"lm_head"}.

    Raises:
        ConfigurationError: an argument is invalid; or, from `bind`, torchao is missing, or no GPU
            here multiplies in MXFP8.

    Example:
        >>> from stratagem_cuda.precision import MXFP8Precision
        >>> MXFP8Precision(emulate=True, ignore_modules={"lm_head"}).name
        'mxfp8'
    """

    kernels = MXFP8_KERNELS
    recipes = RECIPES

    def __init__(
        self,
        name: str = "mxfp8",
        *,
        recipe: str = "mxfp8_rceil",
        emulate: bool = False,
        ignore_modules: Collection[str] = (),
    ) -> None:
        super().__init__(name, recipe=recipe, emulate=emulate, ignore_modules=ignore_modules)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let linear layers compute in MXFP8, in place; parameters stay the same objects."""
        if not self.emulate:
            check_current_mxfp8(self.name)
        # The import takes seconds, and only ranks need it.
        with TORCHAO_MX.importing(self.name):
            from stratagem_cuda.precision.mxfp8_linear import MXFP8Linear

        for layer in find_linear_of(module, self.ignore_modules, BLOCK):
            converted = become(layer, MXFP8Linear)
            converted.emulate = self.emulate
            converted.exact_weight_gradients = self.recipe == RECIPES[1]
        warn_unless_converted(
            module,
            self.name,
            lambda part: isinstance(part, MXFP8Linear),
            f"torch.nn.Linear whose two sizes are multiples of {BLOCK}",
        )
        return module
