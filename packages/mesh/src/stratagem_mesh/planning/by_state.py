"""The size of the tensor axis for a model with unknown activations."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from stratagem_mesh.planning.sizes import divisors, limits_of
from stratagem_mesh.tensor.layers import has_plan


def arguments_by_state(
    model: nn.Module, devices: int, fits: Callable[[float], bool]
) -> tuple[dict[str, int], str] | None:
    """Return arguments by which a rank can gather a layer of the model, and the reason, or None.

    Only models with a plan of their own, such as models of transformers, are known to be divided
    without a run.

    Args:
        model: the model.
        devices: the number of devices on each node.
        fits: whether a rank can hold this share of the layers that FSDP gathers.

    Example:
        >>> arguments_by_state(nn.Linear(2, 2), 8, lambda share: share < 0.5) is None
        True
    """
    planned = next((part for part in model.modules() if has_plan(part)), None)
    if planned is None:
        return None
    heads, _ = limits_of(planned)
    for size in divisors(devices):
        if size > 1 and heads % size == 0 and fits(1 / size):
            each = f", {heads // size} of {heads} heads each" if heads else ""
            return {"tensor": size}, f"the devices of a node share each layer{each}"
    return None
