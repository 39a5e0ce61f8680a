"""ScaledPrecision: linear layers multiply numbers of few bits with scales, by torchao."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from stratagem.accelerators import Accelerator
from stratagem.errors import ConfigurationError
from stratagem.precision import MixedPrecision
from stratagem_cuda.precision.layers import as_names
from stratagem_cuda.precision.objections import Kernels


class ScaledPrecision(MixedPrecision):
    """The base of Float8Precision and MXFP8Precision, which convert the linear layers.

    Args:
        name: the only name of the class.
        recipe: one of `recipes`.
        emulate: whether to round on any device, without kernels.
        ignore_modules: names of modules that stay in bfloat16.

    Raises:
        ConfigurationError: an argument is invalid; or, from `bind`, torchao is missing, or no GPU
            here has the kernels.
    """

    inference_mode = False  # torchao's tensors are cast by operations that it does not have
    kernels: ClassVar[Kernels]
    recipes: ClassVar[tuple[str, ...]]

    def __init__(
        self, name: str, *, recipe: str, emulate: bool, ignore_modules: Collection[str]
    ) -> None:
        kind, expected = type(self).__name__, self.kernels.format.casefold()
        if name != expected:
            raise ConfigurationError(f"{kind}(name={name!r}): expected {expected!r}")
        if recipe not in self.recipes:
            raise ConfigurationError(
                f"{kind}(recipe={recipe!r}): expected one of {', '.join(map(repr, self.recipes))}"
            )
        super().__init__()
        self.name = name
        self.recipe = recipe
        self.emulate = emulate
        self.ignore_modules = as_names(ignore_modules)

    def bind(self, accelerator: Accelerator) -> None:
        """Look for torchao, and for its kernels in the GPUs that this process sees."""
        if self.emulate:
            why = self.kernels.requirement.why_not(self.name)
        else:
            has_kernels = accelerator.device(0).type == "cuda"
            why = self.kernels.why_not(self.name, accelerator.name, has_kernels=has_kernels)
        if why:
            raise ConfigurationError(why)
        super().bind(accelerator)
