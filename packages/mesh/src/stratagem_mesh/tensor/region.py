"""The region of divided layers: its shared inputs, and its random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stratagem_mesh.randomness import OwnStream, generators_of
from stratagem_mesh.tensor.collectives import copy_to_ranks

_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "uniform_", "normal_", "normal", "multinomial"),
    *("rrelu", "gumbel_softmax"),
}
"""Functions and methods that draw random numbers, besides those of dropout."""


class Region:
    """The divided part of a model, from a layer with divided outputs to one with divided inputs.

    Within it each rank has features of its own, so its dropout draws from a seed of its own.
    Outside, all ranks draw the same. The generator returns to its state at the end of a region,
    moved on by one number if the region has drawn any.

    Args:
        mesh: the ranks that share a layer.
        draws: whether the model may draw random numbers in its forward pass.

    Attributes:
        divided: the parameter that has taken the place of each; tied layers share it.
        draws: whether the model may draw random numbers in its forward pass.
    """

    def __init__(self, mesh: DeviceMesh, *, draws: bool) -> None:
        self.mesh = mesh
        self.divided: dict[nn.Parameter, nn.Parameter] = {}
        self.draws = draws
        self._entered: tuple[Tensor, int, Tensor] | None = None
        self._stream: OwnStream | None = None
        self._within: set[nn.Module] = set()

    def enter(self, values: Tensor) -> Tensor:
        """Return the values as layers in the region read them.

        Layers that read one tensor, such as queries, keys and values, share one sum of gradients.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return copy_to_ranks(values, self.mesh)
        known = self._entered
        if known is None or known[0] is not values or known[1] != values._version:
            known = values, values._version, copy_to_ranks(values, self.mesh)
            self._entered = known
        return known[2]

    def begin(self, layer: nn.Module) -> None:
        """Draw from this rank's seed from now on; called after each layer with divided outputs."""
        if not self.draws or not layer.training or torch.compiler.is_compiling():
            return
        # A layer that is called again means that its region was left by an exception, as
        # activation checkpointing does, which restores the generator itself.
        if self._stream is not None and layer not in self._within:
            self._within.add(layer)
            return
        self._within = {layer}
        generators = generators_of(self._device())[-1:]
        self._stream = OwnStream(self.mesh.get_local_rank(), generators, _seed)

    def end(self) -> None:
        """Draw as all ranks do again; called before each layer with divided inputs."""
        self._entered = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()

    def pause(self, layer: nn.Module) -> None:
        """Draw as all ranks do within the region, until `resume`."""
        if self._stream is not None:
            self._stream.pause()

    def resume(self) -> None:
        """Draw from this rank's seed again."""
        if self._stream is not None:
            self._stream.resume()

    def __deepcopy__(self, memo: object) -> Region:
        return self

    def _device(self) -> torch.device:
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())


def _seed(common: int, rank: int) -> int:
    return common + 1 + rank


def draws_numbers(model: nn.Module) -> bool:
    """Whether a module may draw random numbers in its forward pass.

    Attributes tell it that are probabilities of dropping values, and the names of functions that
    its forward method calls.
    """
    return any(_drops(part) or _calls_random(part) for part in model.modules())


def _drops(part: nn.Module) -> bool:
    """Whether a module has a probability of dropping values, by the names of its attributes."""
    return any(
        isinstance(value, (int, float)) and value > 0
        for name, value in _options(part)
        if "drop" in name or (name == "p" and "Drop" in type(part).__name__)
    )


def _calls_random(part: nn.Module) -> bool:
    """Whether the code of a module's forward names a function that draws numbers.

    A name that is an attribute of the module too is its own probability or layer.
    """
    own = isinstance(part, nn.modules.dropout._DropoutNd)
    names = set() if own else _names(type(part), "forward", set())
    random = {name for name in names if "drop" in name or name in _RANDOM}
    return any(not hasattr(part, name) for name in random)


def _names(kind: type, method: str, seen: set[str]) -> set[str]:
    """Return the names in the code of a method, and of the methods that it calls."""
    seen.add(method)
    function = inspect.unwrap(getattr(kind, method))
    codes = [code] if (code := getattr(function, "__code__", None)) is not None else []
    for code in codes:
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    names = {name for code in codes for name in code.co_names}
    own = {n for n in names - seen if inspect.isfunction(getattr(kind, n, None))}
    for name in own - set(vars(nn.Module)):
        names |= _names(kind, name, seen)
    return names


def _options(part: nn.Module) -> Iterable[tuple[str, object]]:
    yield from vars(part).items()
    yield from vars(getattr(part, "config", None) or object).items()
