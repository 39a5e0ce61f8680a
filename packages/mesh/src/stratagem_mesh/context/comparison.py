"""Comparing the outputs of a region in parts with its outputs from the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.data import map_tensors
from stratagem.errors import UserCodeError
from stratagem_mesh.context.attention import without_dropout
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

    Both are compared in evaluation, and in training too if the module trains and draws no other
    random numbers than for dropout; buffers that change then count as outputs. Parameters that
    are zero, which may hide a part of the module, have random values meanwhile.

    Args:
        module: the module that computes both.
        whole: returns the outputs, computed from the whole sequence.
        in_parts: returns the outputs, computed in parts and joined.

    Returns:
        The first difference that rounding does not explain, in words, or None.
    """
    with torch.no_grad(), _own_numbers(module), _without_zeros(module):
        with _evaluated(module):
            found = _first_difference(module, _outputs(module, in_parts), _outputs(module, whole))
        if found is not None or not module.training:
            return found
        with _without_dropout():
            expected, again = (_outputs(module, whole) for _ in range(2))
            if _first_difference(module, again, expected) is not None:
                return None
            return _first_difference(module, _outputs(module, in_parts), expected)


def _outputs(module: nn.Module, compute: Callable[[], Any]) -> list[Tensor]:
    """Return the outputs, and the buffers after them, which are restored."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in buffers]
    outputs = _tensors(compute())
    after = [buffer.clone() for buffer in buffers]
    for buffer, kept in zip(buffers, before, strict=True):
        buffer.copy_(kept)
    return outputs + after


def _first_difference(
    module: nn.Module, received: list[Tensor], expected: list[Tensor]
) -> str | None:
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


_DROPOUTS = (
    *("dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("dropout1d", "dropout2d", "dropout3d"),
)


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Switch off dropout in torch's functions, which modules in training mode call."""
    functional: Any = nn.functional
    attention = functional.scaled_dot_product_attention
    originals = {name: getattr(functional, name) for name in _DROPOUTS}

    def attend(*args: Any, **options: Any) -> Any:
        given = [0.0 if position == 4 else value for position, value in enumerate(args)]
        return attention(*given, **{**options, **({"dropout_p": 0.0} if len(args) < 5 else {})})

    for name in _DROPOUTS:
        setattr(functional, name, lambda input, *args, **options: input)
    functional.scaled_dot_product_attention = attend
    try:
        with without_dropout():
            yield
    finally:
        functional.scaled_dot_product_attention = attention
        for name, original in originals.items():
            setattr(functional, name, original)


@contextmanager
def _without_zeros(module: nn.Module) -> Iterator[None]:
    """Give random values to parameters that are zero, while their module runs.

    Sharded ones are gathered then. Compiled modules keep their values.
    """
    if any(part._compiled_call_impl is not None for part in module.modules()):
        yield
        return
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if part is module:
                zeros = _fill_zeros(part, name)
                stack.callback(_restore_zeros, zeros)
            elif any(True for _ in part.parameters(recurse=False)):
                filled: list[Tensor] = []
                before = part.register_forward_pre_hook(_filler(name, filled))
                after = part.register_forward_hook(_restorer(filled), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


def _filler(name: str, filled: list[Tensor]) -> Callable[..., None]:
    return lambda part, inputs: filled.extend(_fill_zeros(part, name))


def _restorer(filled: list[Tensor]) -> Callable[..., None]:
    def restore(part: nn.Module, inputs: Any, output: Any) -> None:
        _restore_zeros(filled)
        filled.clear()

    return restore


def _fill_zeros(part: nn.Module, name: str) -> list[Tensor]:
    """Fill the parameters of a module that are zero, on all ranks alike; return them."""
    found = []
    for key, parameter in part._parameters.items():
        if parameter is None or not parameter.numel():
            continue
        # Not the parameter itself: autograd may have saved it, and counts its changes.
        values = parameter.data
        if isinstance(values, DTensor):
            if values.device_mesh.mesh_dim_names != ("tensor_parallel",):
                continue  # not gathered
            values = values.to_local()
        if values.is_floating_point() and not bool(values.any()):
            generator = torch.Generator().manual_seed(crc32(f"{name}.{key}".encode()))
            values.copy_(0.1 * torch.randn(values.shape, generator=generator))
            found.append(values)
    return found


def _restore_zeros(zeros: list[Tensor]) -> None:
    for values in zeros:
        values.zero_()


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
    if not whole.ndim and bool(whole.isnan()):
        own = own * whole  # the mean over no label, which is 0 in parts
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
