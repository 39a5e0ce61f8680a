"""Reducing a model to a few layers of each kind, and giving parameters values of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigurationError

DROPOUT = re.compile(
    r"dropout|drop_?prob|drop_?path|layer_?drop|(attn|attention|hidden|resid|embd)_p?drop"
)
"""Names of attributes that are the probability of dropping values."""

_INDEX = re.compile(r"(layer|block)_?(i|idx|index|id|nr|num|number)$|^(idx|index)$")
_COUNT = re.compile(
    r"(n|num)?_?(hidden|encoder|decoder|transformer)?_?(layers?|blocks?)|depth", re.IGNORECASE
)
_PLAIN = bool, int, float, complex, str, torch.dtype, type(None)
_SMALL = 0.02
_LARGE = 2**20


# -- layers


def reduce_layers(model: nn.Module, layers: int) -> dict[str, list[int]]:
    """Keep the first modules of each kind in the stacks of a model, in place and in their order.

    A stack is an `nn.ModuleList` or `nn.Sequential` with several modules of a class that contain
    modules themselves. Two of them are of one kind if class, shapes of parameters and numbers that
    say how they compute are equal. Experts of a router stay. The number of layers and the types of
    layers in a copy of the model's config follow.

    Args:
        model: is changed.
        layers: the number of modules of each kind.

    Returns:
        The former indices of the modules that stay, by the name of each reduced stack.
    """
    copies: dict[int, Any] = {}
    for part in model.modules():
        if "config" in vars(part):
            part.config = deepcopy(part.config, copies)
    kept: dict[str, list[int]] = {}
    _reduce(model, "", layers, [], kept)
    return kept


def _reduce(
    part: nn.Module, name: str, layers: int, owners: list[nn.Module], kept: dict[str, list[int]]
) -> None:
    if isinstance(part, (nn.ModuleList, nn.Sequential)) and "expert" not in name:
        before = len(part)
        own = _first_of_each_kind(part, layers)
        if len(own) < before:
            kept[name] = own
            _keep(part, own)
            _tell([part, *owners], before, own)
    for child_name, child in part.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        _reduce(child, inner, layers, [part, *owners], kept)


def _first_of_each_kind(stack: nn.ModuleList | nn.Sequential, layers: int) -> list[int]:
    counts: dict[Any, int] = {}
    own = []
    for index, block in enumerate(stack):
        is_block = any(True for _ in block.children()) and any(True for _ in block.parameters())
        kind = _kind(block) if is_block else index
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= layers:
            own.append(index)
    return own


def _kind(block: nn.Module) -> Any:
    return tuple(
        (
            name,
            type(part),
            tuple((key, p.shape) for key, p in part._parameters.items() if p is not None),
            tuple(f"{key}={value!r}" for key, value in vars(part).items() if _counts(key, value)),
        )
        for name, part in block.named_modules()
    )


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute says how a module computes, and not where it stands."""
    if name.startswith("_") or _INDEX.search(name) or DROPOUT.search(name):
        return False
    values = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(one, _PLAIN) for one in values)


def _keep(stack: nn.ModuleList | nn.Sequential, own: list[int]) -> None:
    """Leave the modules of these indices, and number them anew."""
    items = list(stack._modules.items())
    stack._modules.clear()
    for position, index in enumerate(own):
        name, block = items[index]
        stack._modules[str(position) if name.isdigit() else name] = block
        assert block is not None
        for part in block.modules():
            for key, value in vars(part).items():
                if type(value) is int and _INDEX.search(key) and value - index in (0, 1):
                    setattr(part, key, value - index + position)


def _tell(owners: list[nn.Module], before: int, own: list[int]) -> None:
    """Adapt the numbers and lists of layers in the stack's owner, and in the nearest config."""
    of_class = type(owners[1] if len(owners) > 1 else owners[0]).__name__.lower()
    other = "decoder" if "encoder" in of_class else "encoder" if "decoder" in of_class else "\0"
    config = next((one.config for one in owners if "config" in vars(one)), None)
    for known in filter(None, (config, *owners[1:2])):
        for key, value in list(vars(known).items()):
            if other in key:
                continue
            if type(value) is int and value == before and _COUNT.fullmatch(key):
                setattr(known, key, len(own))
            elif isinstance(value, list) and len(value) == before and "layer" in key:
                setattr(known, key, [value[index] for index in own])


def former_name(name: str, kept: Mapping[str, Sequence[int]]) -> str:
    """Return the name that a module or parameter had before layers were left out."""
    for stack, own in kept.items():
        if name.startswith(f"{stack}."):
            position, dot, rest = name.removeprefix(f"{stack}.").partition(".")
            if position.isdigit():
                name = f"{stack}.{own[int(position)]}{dot}{rest}"
    return name


# -- values


@contextmanager
def without_values() -> Iterator[None]:
    """Put parameters on the meta device as modules register them; buffers have their values."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            known = vars(param).get("_mesh_without_values")
            if known is None:
                known = _like(param, param.detach().to("meta"))
                param._mesh_without_values = known  # type: ignore[attr-defined]
            param = known
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_values(model: nn.Module, value: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace the parameters of a model by new ones with these values; tied ones stay tied.

    Raises:
        ConfigurationError: a buffer has no values.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, part in model.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = _like(parameter, value(f"{name}.{key}", parameter))
            part._parameters[key] = made[parameter]
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ConfigurationError(
                    f"the buffer {f'{name}.{key}'.strip('.')!r} has no values: it is on the meta "
                    "device, or computed from parameters, which have no values while a model of "
                    "few layers is built. Compare a small model with all of its layers"
                )
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with other values and the same attributes."""
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


class Draws:
    """Draws values of parameters: weights are small, norms are near to 1, biases near to 0.

    The values are uniform, and follow from the order of the calls alone.

    Args:
        device: the device of the values.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._numbers = torch.Generator(device)
        self._count = 0

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        """Return values in the shape of a parameter, in float64 if it holds fractions."""
        self._count += 1
        dtype = in_double(parameter.dtype)
        made = torch.empty(parameter.shape, dtype=dtype, device=self._device)
        self._draw(name, torch.view_as_real(made) if made.is_complex() else made)
        return made

    def _draw(self, name: str, made: Tensor, part: int = 0, parts: int = 1) -> None:
        """Draw all values, or the blocks of one of several ranks."""
        if not made.is_floating_point():
            made.zero_()
            return
        is_bias = "bias" in name.rpartition(".")[2]
        width = made[0].numel() ** -0.5 if made.ndim > 1 else _SMALL
        middle = 0.0 if made.ndim > 1 or is_bias else 1.0
        for index, block in enumerate(torch.split(made.view(-1), _LARGE)):
            if index % parts == part:
                self._numbers.manual_seed(self._count * 4096 + index)
                block.uniform_(middle - width, middle + width, generator=self._numbers)


class DrawsOfRanks(Draws):
    """Draws large values once for all ranks of this machine, which map one file of them.

    The whole values exist for a short time: the strategy copies a rank's shard.

    Args:
        folder: the folder of the files.
        rank, ranks: this rank, and their number.
        barrier: waits for all ranks.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, barrier: Callable[[], object]) -> None:
        super().__init__()
        self._folder, self._rank, self._ranks, self._barrier = folder, rank, ranks, barrier

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        """Return values as `Draws` does."""
        if parameter.numel() < _LARGE or not parameter.is_floating_point():
            return super().__call__(name, parameter)
        self._count += 1
        file = str(self._folder / f"values{self._count}")
        numbers = parameter.numel()
        flat = torch.from_file(file, shared=True, size=numbers, dtype=torch.float64)
        self._draw(name, flat.view(parameter.shape), self._rank, self._ranks)
        self._barrier()
        return flat.view(parameter.shape)


def zeros(name: str, parameter: Tensor) -> Tensor:
    """Return zeros in the shape of a parameter, which a checkpoint is to replace."""
    return torch.zeros(parameter.shape, dtype=in_double(parameter.dtype))


def in_double(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a comparison for values of a dtype."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def without_dropout(model: nn.Module) -> None:
    """Set the probabilities of dropping values to 0, in place.

    Experts of transformers then compute in a loop, since the grouped product has no float64.
    """
    for part in model.modules():
        config: Any = vars(part).get("config")
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "eager"
        for name, value in vars(part).items():
            if isinstance(value, float) and (
                DROPOUT.search(name) or (name == "p" and "Dropout" in type(part).__name__)
            ):
                setattr(part, name, 0.0)
