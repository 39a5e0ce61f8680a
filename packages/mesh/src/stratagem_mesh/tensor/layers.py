"""Dividing the layers of a model between the ranks of the tensor axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from stratagem.errors import ConfigurationError

TensorPlan = Mapping[str, str | ParallelStyle] | Callable[[nn.Module, DeviceMesh], Any]

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}


def check_plan(plan: Any) -> None:
    """Raise for a plan that is neither a function nor a mapping of known styles.

    Raises:
        ConfigurationError: names the entry.
    """
    if plan is None or callable(plan):
        return
    if not isinstance(plan, Mapping):
        raise ConfigurationError(
            f"tensor_plan={plan!r}: expected a mapping of names to styles, such as "
            "{'layers.*.up': 'colwise'}, or a function (model, mesh)"
        )
    for name, style in plan.items():
        if style not in STYLES and not isinstance(style, ParallelStyle):
            raise ConfigurationError(
                f"tensor_plan[{name!r}]={style!r}: expected one of "
                f"{', '.join(map(repr, STYLES))}, or a style of torch.distributed.tensor.parallel"
            )


def divide_layers(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan | None) -> dict[str, str]:
    """Divide a model's layers between the ranks of a mesh with one dimension, in place.

    Returns:
        The style of each divided module, by its name.
    """
    if callable(plan):
        plan(model, mesh)
        return {}
    styles = {}
    for pattern, style in (plan or {}).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        found = [name for name, _ in model.named_modules() if expression.fullmatch(name)]
        for name in found:
            parallel = STYLES[style]() if isinstance(style, str) else style
            parallelize_module(model.get_submodule(name), mesh, parallel)
            styles[name] = str(style)
    return styles
