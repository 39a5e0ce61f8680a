"""Comparing the values of a step on a mesh with those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from stratagem.checkpoint import Shards
from stratagem_mesh.expert.dispatch import inner_modules
from stratagem_torch.sharding import shards_of, whole_on_cpu

TOLERANCE = 1e-9
"""The largest relative difference in float64 that rounding explains."""

OUTPUTS = "outputs of modules"

Pieces = list[tuple[tuple[int, ...], Tensor]]
"""Parts of a tensor that a rank holds, with the index of the first element of each."""


@dataclass(frozen=True)
class Row:
    """A compared quantity.

    Attributes:
        what: its name.
        difference: the largest difference, relative to the largest element in one process.
        where: the parameter or the module with it; "" if the quantity is one number.
        others: the names of further ones that differ by more than rounding.
    """

    what: str
    difference: float
    where: str = ""
    others: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= TOLERANCE


class KeepFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, as norms and losses often do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        kept = [torch.float64 if one is torch.float32 else one for one in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*kept, **named)


class Outputs(dict[str, list[Tensor]]):
    """The first output of each module of a model, for each call, in the order in which they end.

    Modules in divided experts are left out.

    Args:
        model: is watched until `close`.
        parts: the parts of the model that are watched; default: the model.
    """

    def __init__(self, model: nn.Module, parts: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        others = inner_modules(model)
        inside = {one for part in parts or () for one in part.modules()}
        chosen = model.named_modules() if parts is None else _named(model, inside)
        named = [(n, part) for n, part in chosen if n and part not in others]
        self._hooks = [part.register_forward_hook(self._keep(name)) for name, part in named]

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(part: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                self.setdefault(name, []).append(whole_on_cpu(first))

        return hook

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()


def _named(model: nn.Module, parts: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    yield from ((name, part) for name, part in model.named_modules() if part in parts)


def pieces_of(tensor: Tensor) -> Pieces:
    """Return the parts of a tensor that this rank holds; only sums of ranks communicate."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        tensor = tensor.full_tensor()
    own = shards_of(tensor)
    if isinstance(own, Shards):
        return [(tuple(offset), chunk) for offset, chunk in own.chunks]
    return [((0,) * own.ndim, own)]


def save_pieces(
    folder: Path, rank: int, what: str, tensors: Mapping[str, Tensor], lacks: Collection[str] = ()
) -> None:
    """Write a rank's parts of tensors to a file, and the names that only other ranks have."""
    held = {name: (tensor.shape, pieces_of(tensor)) for name, tensor in tensors.items()}
    torch.save((held, list(lacks)), folder / f"{what}{rank}.pt")


def compare_saved(
    what: str, folder: Path, name: str, ranks: int, expected: Mapping[str, Tensor]
) -> Row:
    """Compare tensors with the parts that ranks have written; a rank has each that it may have."""
    largest = {key: largest_of(tensor) for key, tensor in expected.items()}
    differences = dict.fromkeys(expected, 0.0)
    everywhere_absent = set(expected)
    for rank in range(ranks):  # one at a time, to hold few of the mapped parts
        held, lacks = torch.load(folder / f"{name}{rank}.pt", weights_only=True, mmap=True)
        everywhere_absent.intersection_update(lacks)
        for key in expected.keys() - set(lacks):
            tensor = expected[key]
            shape, pieces = held.pop(key, (None, []))
            is_alike = shape == tensor.shape
            found = of_pieces(pieces, tensor, largest[key]) if is_alike else math.inf
            differences[key] = max(differences[key], found)
    differences.update(dict.fromkeys(everywhere_absent, math.inf))
    return row_of(what, differences, last=True)


def row_of(what: str, differences: Mapping[str, float], *, last: bool) -> Row:
    """Return the row of differences by name, with the first one that counts, or the last."""
    apart = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    first = apart[-1:] if last else apart[:1]
    worst = first or sorted(differences, key=differences.__getitem__)[-1:]
    others = tuple(name for name in apart if name not in worst)
    return Row(what, max(differences.values(), default=0.0), "".join(worst), others)


def compare_outputs(
    found: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]]
) -> Row:
    """Compare the first output of each module, but for those of parts, which have other shapes.

    It is to equal that of one of the calls in one process, whose order may be another. The stages
    of a pipeline may have begun further batches.
    """
    differences = {}
    for name, calls in expected.items():
        own = found.get(name, ())[: len(calls)]
        if own and _shapes(own) == _shapes(calls):
            alike = (one for one in calls if one.shape == own[0].shape)
            differences[name] = min(difference(own[0], one) for one in alike)
    return row_of(OUTPUTS, differences, last=False)


def _shapes(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(tensor.shape) for tensor in tensors)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected element."""
    if found.shape != expected.shape:
        return math.inf
    return of_pieces([((0,) * found.ndim, found)], expected, largest_of(expected))


def of_pieces(pieces: Pieces, expected: Tensor, largest: float) -> float:
    """Return the largest difference of parts of a tensor, as `difference` does."""
    apart = 0.0
    for offset, piece in pieces:
        sizes = zip(offset, piece.shape, strict=True)
        region = expected[tuple(slice(first, first + size) for first, size in sizes)]
        apart = max(apart, largest_of(piece.to(region.device) - region))
    return apart / largest if 1e-12 < largest < math.inf else apart


def largest_of(tensor: Tensor) -> float:
    """Return the largest absolute value, without a copy; not a number counts as infinite."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    low, high = torch.aminmax(tensor)
    largest = max(-float(low), float(high))
    return math.inf if math.isnan(largest) else largest
