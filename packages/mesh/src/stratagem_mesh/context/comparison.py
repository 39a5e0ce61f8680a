"""Comparing the outputs of a region in parts with its outputs from the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import UserCodeError
from stratagem_mesh.context.kinds import title

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 5e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 6e-2,
}
"""Differences by rounding, relative to the largest value of a tensor."""


class Divided(Protocol):
    """A region."""

    name: str
    module: nn.Module

    def in_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs, computed in parts."""

    def whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs, computed from the whole sequence."""


def compare(region: Divided, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if a region computes something else in parts, without dropout.

    Raises:
        UserCodeError: names the region.
    """
    whole, in_parts = region.whole, region.in_parts
    found = difference(region.module, lambda: whole(args, kwargs), lambda: in_parts(args, kwargs))
    if found is not None:
        raise UserCodeError(
            f"{title(region.name, region.module)} computes something else when "
            f"ranks divide its sequence: {found}. Something in it reads positions of other ranks "
            "otherwise than by scaled_dot_product_attention, or counts positions by itself: "
            "name in context_modules the modules that do not, or pass context=1"
        )


def difference(
    module: nn.Module, whole: Callable[[], Any], in_parts: Callable[[], Any]
) -> str | None:
    """Return how the outputs of a module in parts differ from the whole ones, without dropout.

    Args:
        module: the module that computes both.
        whole: returns the outputs, computed from the whole sequence.
        in_parts: returns the outputs, computed in parts and joined.

    Returns:
        The first difference that rounding does not explain, in words, or None.
    """
    with torch.no_grad(), _own_numbers(module), _evaluated(module):
        expected, received = _tensors(whole()), _tensors(in_parts())
    for own, one in zip(received, expected, strict=True):
        error = _relative_error(own, one)
        if not error <= _tolerance(module, one):
            shape = tuple(one.shape)
            return f"an output of shape {shape} is off by {error:.1e} of its largest value"
    return None


def _own_numbers(module: nn.Module) -> AbstractContextManager[None]:
    """Restore the generators of random numbers afterwards."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices, device_type="cuda")


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, in each module that has it on, and torch's own way of evaluation."""
    training = [part for part in module.modules() if part.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it sets padded positions to zero
    for part in training:
        part.training = False
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for part in training:
            part.training = True


def _tensors(output: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            found.append(tensor)
        return tensor

    map_tensors(note, output)
    return found


def _relative_error(own: Tensor, whole: Tensor) -> float:
    if own.shape != whole.shape:
        return float("inf")
    own, whole = own.double(), whole.double()
    largest = whole.nan_to_num().abs().max() if whole.numel() else 0.0
    difference = (own.nan_to_num() - whole.nan_to_num()).abs()
    if bool((own.isnan() != whole.isnan()).any()):
        return float("inf")
    return float(difference.max() / (largest + 1e-30)) if whole.numel() else 0.0


def _tolerance(module: nn.Module, output: Tensor) -> float:
    kinds = {output.dtype, *(p.dtype for p in module.parameters())}
    if torch.is_autocast_enabled(output.device.type):
        kinds.add(torch.get_autocast_dtype(output.device.type))
    return max(TOLERANCES.get(kind, 0.0) for kind in kinds)
