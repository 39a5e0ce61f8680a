"""A parameter's shard on this rank, and a gradient in the shards of its parameter."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigurationError


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: Tensor, optimizer: str) -> Tensor:
    """Return the gradient, sharded as its parameter is.

    Args:
        parameter: a parameter with a gradient.
        optimizer: the name of the optimizer, for the error.

    Raises:
        ConfigurationError: the gradient is sparse or complex.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.is_complex():
        raise ConfigurationError(
            f"{optimizer} received a gradient of {gradient.dtype} and {gradient.layout}; expected "
            "a dense, real one: give this parameter to another optimizer"
        )
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", None) != placements:
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return gradient
