"""How the inputs of a module are cut along the sequence, and its outputs joined."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import UserCodeError
from stratagem_mesh.context.attention import both, causal
from stratagem_mesh.context.call import Call, divides
from stratagem_mesh.context.collectives import ContextGroup, gather

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Kind(Protocol):
    """A kind of module that reads a sequence."""

    def cut(
        self, group: ContextGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Arguments] | None:
        """Return the call and the inputs of this rank's part; None to compute all on each rank."""

    def join(self, call: Call, output: Any) -> Any:
        """Return the whole outputs."""


def title(name: str, module: nn.Module) -> str:
    """Return how errors call a module."""
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a module by their names."""
    # Not that of the module itself, which may be compiled, with other names.
    signature = inspect.signature(MethodType(type(module).forward, module))
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


class NamedModule:
    """A module that the user names: its inputs are (batch, sequence, ...), as are its outputs.

    An input of sequence x sequence is a mask, which is not cut; as is one without a sequence.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = title(name, module)
        self._module = module

    def cut(
        self, group: ContextGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Arguments] | None:
        """See Kind."""
        sizes: list[torch.Size] = []
        map_tensors(lambda tensor: sizes.append(tensor.shape), (args, dict(kwargs)))
        known = [size for size in sizes if len(size) > 1]
        if not known:
            raise UserCodeError(
                f"{self._name} was called without a tensor of (batch, sequence, ...): expected "
                "one, whose sequence is divided; leave the module out of context_modules"
            )
        batch, length = known[0][:2]
        if not divides(length, group):
            return None
        call = Call(self._name, group, length)

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != length or self._is_mask(tensor, batch):
                is_mask = tensor.ndim > 1 and tensor.shape[-2:] == (length, length)
                return tensor if is_mask else call.share(tensor)
            return call.cut(tensor, 1)

        return call, map_tensors(cut, (args, dict(kwargs)))

    def _is_mask(self, tensor: Tensor, batch: int) -> bool:
        if tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1]:
            return False
        is_index = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
        if tensor.shape[0] == batch and not is_index:
            raise UserCodeError(
                f"{self._name} was called with a {tensor.dtype} tensor of {batch} x {batch}, which "
                "is either a mask of the sequence or one entry for each position of the batch: "
                f"expected a batch of another size than the sequence, or a mask of 4 dimensions"
            )
        return not is_index

    def join(self, call: Call, output: Any) -> Any:
        """See Kind."""

        def join(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != call.part:
                raise UserCodeError(
                    f"{self._name} returned a tensor of shape {tuple(tensor.shape)}: expected "
                    f"(batch, sequence, ...) with {call.part} positions, the part of a rank, which "
                    "are joined. Name in context_modules the modules inside of it that return "
                    "sequences"
                )
            return gather(tensor, call.group, 1, call).narrow(1, 0, call.length)

        return map_tensors(join, output)


class TorchEncoder:
    """`nn.TransformerEncoder`; its masks are kept from its layers, and given to attention."""

    def __init__(self, name: str, module: nn.TransformerEncoder) -> None:
        self._name = title(name, module)
        self._module = module
        attention: Any = module.layers[0].self_attn
        self._is_batch_first = bool(attention.batch_first)
        self._heads = int(attention.num_heads)
        self._own: slice = getattr(attention, "heads_of_rank", slice(None))  # of a tensor axis

    def _dim(self, tensor: Tensor) -> int:
        return 1 if self._is_batch_first and tensor.ndim == 3 else 0

    def cut(
        self, group: ContextGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Arguments] | None:
        """See Kind."""
        inputs = bind(self._module, args, kwargs)
        source: Tensor = inputs["src"]
        length = source.shape[self._dim(source)]
        if not divides(length, group):
            return None
        call = Call(self._name, group, length)
        mask: Tensor | None = inputs.pop("mask", None)
        padding: Tensor | None = inputs.pop("src_key_padding_mask", None)
        if mask is not None:
            inputs.pop("is_causal", None)
            mask = self._allowed(mask)
            if mask.ndim == 3:
                mask = mask.view(-1, self._heads, length, length)[:, self._own]
        if mask is not None and padding is None and _equals(mask, causal(length, mask.device)):
            call.is_causal = True
        else:
            keys = None if padding is None else self._allowed(padding)[..., None, None, :]
            call.mask = both(mask, keys)
        return call, ((), {**inputs, "src": call.cut(source, self._dim(source))})

    @staticmethod
    def _allowed(mask: Tensor) -> Tensor:
        """Return a mask in which True allows; torch's layers take one in which it forbids."""
        if mask.dtype == torch.bool:
            return ~mask
        allowed = mask == 0
        return allowed if bool((allowed | (mask == float("-inf"))).all()) else mask

    def join(self, call: Call, output: Any) -> Any:
        """See Kind."""
        dim = self._dim(output)
        return gather(output, call.group, dim, call).narrow(dim, 0, call.length)


def _equals(mask: Tensor, other: Tensor) -> bool:
    return mask.dtype == torch.bool and mask.shape == other.shape and bool((mask == other).all())
