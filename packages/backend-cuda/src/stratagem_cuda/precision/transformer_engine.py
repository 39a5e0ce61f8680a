"""TransformerEnginePrecision: NVIDIA's float8 layers. Contract-tested, never run on hardware."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from stratagem.accelerators import Accelerator
from stratagem.errors import ConfigurationError
from stratagem.precision import TruePrecision, default_dtype
from stratagem_cuda.precision.compute_capability import (
    check_current_float8,
    why_no_visible_float8,
)
from stratagem_cuda.precision.layers import (
    FLOAT8_LINEAR,
    as_names,
    become,
    find_float8_linear,
    find_layers,
    warn_unless_converted,
)
from stratagem_cuda.precision.requirement import TRANSFORMER_ENGINE

DTYPES = {"transformer-engine": "bf16-true", "transformer-engine-float16": "16-true"}


class TransformerEnginePrecision(TruePrecision):
    """Linear layers and layer norms by Transformer Engine, which multiplies in float8.

    Parameters are in bfloat16 or float16, as under 'bf16-true' and '16-true', and checkpoints hold
    the same entries. `torch.nn.Linear` (with sizes that are multiples of 16) and
    `torch.nn.LayerNorm` are exchanged for layers of `transformer_engine.pytorch` with the same
    parameters; layers with hooks, and subclasses, are unchanged. A batch must have a multiple of 8
    rows (samples times positions).

    Layers of Transformer Engine put pickled bytes into a state dict, and loading them executes
    code: here they neither save nor load these bytes. The default recipe has no state, so that no
    information is lost; with `DelayedScaling` a resumed run begins with new scales, and warns.

    Args:
        name: "transformer-engine" (bfloat16), or "transformer-engine-float16".
        recipe: a recipe of `transformer_engine.common.recipe`; None: `Float8CurrentScaling()`.
        replace_layers: True replaces layers, False does not; None replaces layers unless the model
            has layers of Transformer Engine already.
        ignore_modules: names of modules that are not replaced, such as {"lm_head"}.

    Raises:
        ConfigurationError: an argument is invalid; or, from `bind`, Transformer Engine is missing,
            or no GPU here supports float8.

    Example:
        >>> from stratagem_cuda.precision import TransformerEnginePrecision
        >>> TransformerEnginePrecision("transformer-engine-float16").dtype
        torch.float16
    """

    def __init__(
        self,
        name: str = "transformer-engine",
        *,
        recipe: Any = None,
        replace_layers: bool | None = None,
        ignore_modules: Collection[str] = (),
    ) -> None:
        if name not in DTYPES:
            raise ConfigurationError(
                f"TransformerEnginePrecision(name={name!r}): expected one of "
                f"{', '.join(map(repr, DTYPES))}"
            )
        if recipe is not None and not hasattr(recipe, "delayed"):
            raise ConfigurationError(
                f"TransformerEnginePrecision(recipe={recipe!r}): expected a recipe of "
                "transformer_engine.common.recipe, such as MXFP8BlockScaling()"
            )
        super().__init__(DTYPES[name])
        self.name = name
        self.recipe = recipe
        self.replace_layers = replace_layers
        self.ignore_modules = as_names(ignore_modules)

    def bind(self, accelerator: Accelerator) -> None:
        """Look for Transformer Engine, and for float8 in the GPUs that this process sees."""
        TRANSFORMER_ENGINE.check(self.name)
        if accelerator.device(0).type != "cuda":
            raise ConfigurationError(
                f"precision={self.name!r} works on 'cuda', received accelerator="
                f"{accelerator.name!r}: change one of the two"
            )
        if why := why_no_visible_float8(self.name):
            raise ConfigurationError(why)
        super().bind(accelerator)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace layers by Transformer Engine's layers, and convert all other modules."""
        check_current_float8(self.name)
        has_own = any(map(_is_engines, module.modules()))
        if self.replace_layers or (self.replace_layers is None and not has_own):
            self._replace_layers(module)
        for part in module.modules():
            if _is_engines(part):
                kind: Any = type(part)
                become(part, _without_extra_state(kind))
        if self.recipe is not None and self.recipe.delayed():
            warnings.warn(
                f"recipe={self.recipe!r} scales by the largest values of earlier steps, which no "
                "checkpoint holds: a resumed run begins without them, and is not exact. "
                "Float8CurrentScaling(), the default, has no such state",
                stacklevel=2,
            )
        warn_unless_converted(
            module, self.name, _is_engines, f"{FLOAT8_LINEAR}, and no torch.nn.LayerNorm"
        )
        return super().convert_module(module)

    def _replace_layers(self, module: nn.Module) -> None:
        """Put layers of Transformer Engine in the place of torch's, with the same parameters."""
        import transformer_engine.pytorch as te

        made: dict[nn.Module, nn.Module] = {}
        # On the meta device, so that nothing is allocated and no random number is drawn.
        for layer in find_float8_linear(module, self.ignore_modules):
            made[layer] = te.Linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                params_dtype=self.dtype,
                device="meta",
            )
        for norm in find_layers(module, nn.LayerNorm, self.ignore_modules).values():
            if norm.weight is not None and norm.bias is not None:
                made[norm] = te.LayerNorm(
                    norm.normalized_shape, eps=norm.eps, dtype=self.dtype, device="meta"
                )
        made = {layer: new for layer, new in made.items() if not _has_hooks(layer)}
        for before, new in made.items():
            new._parameters.update(before._parameters)
            new.training = before.training
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in made:
                    parent._modules[name] = made[child]

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which layers of Transformer Engine multiply in float8."""
        return _Autocast(self.dtype, self.recipe)


class _Autocast(AbstractContextManager[None]):
    """`transformer_engine.pytorch.autocast`, which serves once, again and again."""

    def __init__(self, dtype: torch.dtype, recipe: Any) -> None:
        self._dtype = dtype
        self._recipe = recipe
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        # Here, since a context is made in the launching process too.
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        if self._recipe is None:
            self._recipe = Float8CurrentScaling()
        with ExitStack() as stack:
            stack.enter_context(default_dtype(self._dtype))
            stack.enter_context(te.autocast(enabled=True, recipe=self._recipe))
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def _is_engines(part: nn.Module) -> bool:
    return type(part).__module__.startswith("transformer_engine.")


def _has_hooks(layer: nn.Module) -> bool:
    return any(table for name, table in vars(layer).items() if name.endswith("_hooks"))


@cache
def _without_extra_state(kind: Any) -> Any:
    """Return the class of a layer without its pickled state, as `fully_shard` exchanges classes."""
    if kind.get_extra_state is nn.Module.get_extra_state:
        return kind
    plain = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    return type(kind.__name__, (kind,), {**plain, "__module__": kind.__module__})
